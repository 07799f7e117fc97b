//! Data sets of rows in memory, for example the result of a query or of another library. `tabular` describes what
//! becomes of their columns.

use std::path::Path;
use std::sync::Arc;

use shared_proto::job::Data;

use super::tabular;
use crate::columns::cell::Cell;
use crate::columns::header::{Header, LabelColumn, unfit};
use crate::columns::table::{Numbers, Rows, Table};
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::place::{Place, Unit};
use crate::reading::chunks::{Chunk, Chunks};
use crate::samples::memory::InMemory;
use crate::source::DataSetup;

/// The most rows that a batch can have.
const MOST_ROWS: usize = u32::MAX as usize;

/// Rows of a table in memory, column by column.
pub trait RowBatch: Send + Sync + 'static {
    /// Returns the names of the columns.
    fn names(&self) -> Vec<String>;

    /// Returns the names of the columns that are the index of a pandas frame. These columns are ignored unless the job
    /// gives them a type. By default there are none.
    fn index_columns(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns whether each cell of a column is a list.
    fn has_lists(&self, column: usize) -> bool;

    /// Passes the cells of a column to `cells`, in the order of the rows. A single cell goes to [`CellWriter::push`].
    /// In a column of lists, each element goes to [`CellWriter::push_element`], and [`CellWriter::end_list`] ends each
    /// list.
    ///
    /// # Errors
    /// [`CellWriter::unfit`] for a column that cannot be read; those of `cells`.
    fn read(&self, column: usize, cells: &mut CellWriter) -> Result<(), InputError>;
}

/// Adds cells to a column.
pub struct CellWriter<'a> {
    table: &'a mut Table,
    column: usize,
    name: &'a str,
}

impl CellWriter<'_> {
    /// Adds the cell of the next row.
    ///
    /// # Errors
    /// Names the row, the column and the cell, and what was expected.
    pub fn push(&mut self, cell: Cell) -> Result<(), InputError> {
        self.table.push(self.column, cell)
    }

    /// Adds an element to the list of the next row.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_element(&mut self, cell: Cell) -> Result<(), InputError> {
        self.table.push_element(self.column, cell)
    }

    /// Ends the list of the next row.
    pub fn end_list(&mut self) {
        self.table.end_list(self.column);
    }

    /// Returns the error for a column that cannot be read, with the line of a job that leaves the column out. In the
    /// message, `problem` follows the column's name, as in `has structures`.
    pub fn unfit(&self, problem: &str) -> InputError {
        self.table.header_place().wrong(unfit(self.name, problem))
    }
}

/// Opens rows in memory as a data set, like the same rows in a file: with the column types, the label, the missing
/// values and the held-out share of the job's settings. For an evaluation or a prediction, the columns are read as in
/// training. `origin` names the rows in messages.
///
/// # Errors
/// Names the row, the column and the cell that does not fit; [`InputError::Invalid`] if there is no row.
pub fn open_batches<B: RowBatch>(
    setup: &DataSetup,
    origin: &str,
    batches: Vec<B>,
) -> Result<Dataset, InputError> {
    let file: Arc<Path> = Path::new(origin).into();
    let batches = Arc::new(batches);
    tabular::open_rows(setup, &file, |setup, labels| {
        let fitted = setup.purpose.fitted();
        Batches::new(&file, setup.settings, fitted, &batches, labels)
    })
}

impl Fitted {
    /// Converts rows to samples, with the parameters of the training. Labels and weights are not read, and may be
    /// missing. The samples have a target of zeros. `settings` are the settings of the training.
    ///
    /// # Errors
    /// Names the row, the column and the cell that does not fit; [`InputError::Invalid`] if there is no row, or if the
    /// training data had no columns.
    pub fn samples(&self, settings: &Data, rows: impl RowBatch) -> Result<InMemory, InputError> {
        if self.columns.is_empty() {
            return Err(InputError::Invalid(format!(
                "the model was trained on data of the kind {:?}, which has no columns; give its inputs as columns of numbers or ids",
                settings.kind
            )));
        }
        let file: Arc<Path> = Path::new("the rows").into();
        let labels = LabelColumn::LeftOut;
        let rows = Arc::new(vec![rows]);
        let batches = Batches::new(&file, settings, Some(self), &rows, labels)?;
        tabular::unlabelled(self.clone())(batches.read(0)?)
    }
}

/// Batches of rows. Each batch with samples is a chunk.
struct Batches<B> {
    file: Arc<Path>,
    header: Header,
    batches: Arc<Vec<B>>,
    parts: Vec<Part>,
    chunks: Vec<Chunk>,
}

/// A batch that has samples.
struct Part {
    batch: usize,
    /// The number of the batch's first row, counted from 1 over all batches.
    first: u64,
    /// The indices of the rows with a label; `None` if all rows are samples.
    labelled: Option<Vec<u32>>,
}

impl<B: RowBatch> Batches<B> {
    fn new(
        file: &Arc<Path>,
        settings: &Data,
        fitted: Option<&Fitted>,
        batches: &Arc<Vec<B>>,
        labels: LabelColumn,
    ) -> Result<Self, InputError> {
        let mut header = None;
        for batch in batches.iter() {
            let own = header_of(file, settings, fitted, batch, labels)?;
            match &header {
                None => header = Some(own),
                Some(first) => first.check_same(&own, &Place::row(file, 1))?,
            }
        }
        let no_row = || {
            InputError::Invalid(format!(
                "{} has no row; at least one is needed",
                file.display()
            ))
        };
        let mut all = Self {
            file: file.clone(),
            header: header.ok_or_else(no_row)?,
            batches: batches.clone(),
            parts: Vec::new(),
            chunks: Vec::new(),
        };
        let (mut first, mut left_out) = (1, 0);
        for (number, batch) in batches.iter().enumerate() {
            let rows = batch.rows();
            if rows > MOST_ROWS {
                return Err(Place::row(file, first).wrong(format!(
                    "a batch has {rows} rows, and at most {MOST_ROWS} are possible; give smaller batches"
                )));
            }
            let labelled = match all.header.skips_unlabelled() {
                true => Some(all.table(batch, first)?.labelled()),
                false => None,
            };
            let samples = labelled.as_ref().map_or(rows, Vec::len);
            if samples > 0 {
                all.chunks.push(Chunk {
                    samples: samples as u32,
                    bytes: (samples * 8 * (all.header.names().len() + 1)) as u64,
                });
                all.parts.push(Part {
                    batch: number,
                    first,
                    labelled,
                });
            }
            left_out += rows - samples;
            first += rows as u64;
        }
        if left_out > 0 {
            tracing::warn!(origin = %file.display(), "{left_out} rows without a label are left out");
        }
        match all.parts.is_empty() {
            true => Err(no_row()),
            false => Ok(all),
        }
    }

    /// Returns a batch as a table. `first` is the number of the batch's first row.
    fn table(&self, batch: &B, first: u64) -> Result<Table, InputError> {
        let rows = batch.rows();
        let mut table = self.header.table(Rows {
            file: self.file.clone(),
            unit: Unit::Row,
            numbers: Numbers::From(first, rows),
        });
        for (column, name) in self.header.names().iter().enumerate() {
            if self.header.is_ignored(column) {
                continue;
            }
            let mut cells = CellWriter {
                table: &mut table,
                column,
                name,
            };
            batch.read(column, &mut cells)?;
            let found = table.cells(column);
            if found != rows {
                return Err(table
                    .header_place()
                    .wrong(format!("column {name:?} has {found} cells for {rows} rows")));
            }
        }
        Ok(table)
    }
}

fn header_of<B: RowBatch>(
    file: &Arc<Path>,
    settings: &Data,
    fitted: Option<&Fitted>,
    batch: &B,
    labels: LabelColumn,
) -> Result<Header, InputError> {
    let names = batch.names();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let known = fitted.map(|fitted| |name: &str| fitted.has_column(name));
    let indices = batch.index_columns();
    let indices: Vec<&str> = indices.iter().map(String::as_str).collect();
    let mut header = Header::new(file, Unit::Row, &names, &indices, settings, known, labels)?;
    for (column, name) in names.iter().enumerate() {
        if batch.has_lists(column) && !header.has_lists(column) {
            let problem = "has lists, which can be ids (type = \"id\")";
            return Err(Place::row(file, 1).wrong(unfit(name, problem)));
        }
    }
    Ok(header)
}

impl<B: RowBatch> Chunks for Batches<B> {
    type Raw = Table;
    type Parsed = Table;

    fn decodes_whole(&self) -> bool {
        !self.header.has_ids()
    }

    fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Table, InputError> {
        let part = &self.parts[chunk];
        let table = self.table(&self.batches[part.batch], part.first)?;
        Ok(table.selected(part.labelled.as_deref()))
    }

    fn parse(&self, table: &Table, samples: &[u32]) -> Result<Table, InputError> {
        Ok(table.select(samples))
    }

    fn parse_all(&self, table: Table, _: &[u32]) -> Result<Table, InputError> {
        Ok(table)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for part in &self.parts {
            match self.table(&self.batches[part.batch], part.first) {
                Ok(table) => table.digest(hash),
                // Whoever reads the batch says what is wrong.
                Err(_) => hash(b"unreadable"),
            }
        }
    }
}

/// Rows that a program gives in its code, for predictions of a few samples at a time.
///
/// ```
/// # mod flambeau { pub use flambeau_data::*; }
/// use flambeau::{RowBatch, TableRows};
///
/// let rows = TableRows::new()
///     .column("city", ["Bern", "Basel"])
///     .column("age", [Some(31), None])
///     .lists("clicked", [vec![17, 4], vec![]]);
/// assert_eq!(rows.rows(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct TableRows {
    names: Vec<String>,
    columns: Vec<OwnColumn>,
}

#[derive(Clone, Debug)]
enum OwnColumn {
    Single(Vec<OwnCell>),
    Lists(Vec<Vec<OwnCell>>),
}

/// A cell of [`TableRows`]: a text, a number, a boolean, or `None` for a missing value.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnCell(Option<Content>);

#[derive(Clone, Debug, PartialEq)]
enum Content {
    Text(String),
    Integer(i128),
    Double(f64),
    Single(f32),
    Boolean(bool),
}

impl OwnCell {
    fn cell(&self) -> Cell<'_> {
        match &self.0 {
            None => Cell::Missing,
            Some(Content::Text(text)) => Cell::Text(text),
            Some(Content::Integer(number)) => Cell::Integer(*number),
            Some(Content::Double(number)) => Cell::Double(*number),
            Some(Content::Single(number)) => Cell::Single(*number),
            Some(Content::Boolean(truth)) => Cell::Boolean(*truth),
        }
    }
}

macro_rules! cells_from {
    ($($from:ty => $content:expr),* $(,)?) => {$(
        impl From<$from> for OwnCell {
            fn from(value: $from) -> Self {
                Self(Some($content(value.into())))
            }
        }
    )*};
}

cells_from!(
    &str => Content::Text, String => Content::Text,
    i32 => Content::Integer, i64 => Content::Integer, u32 => Content::Integer, u64 => Content::Integer,
    f32 => Content::Single, f64 => Content::Double, bool => Content::Boolean,
);

impl<T: Into<OwnCell>> From<Option<T>> for OwnCell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self(None), Into::into)
    }
}

impl TableRows {
    /// Returns rows without columns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a column with a cell for each row.
    #[must_use]
    pub fn column<T: Into<OwnCell>>(
        mut self,
        name: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Self {
        self.names.push(name.to_owned());
        let cells = cells.into_iter().map(Into::into).collect();
        self.columns.push(OwnColumn::Single(cells));
        self
    }

    /// Adds a column with a list for each row.
    #[must_use]
    pub fn lists<T: Into<OwnCell>>(
        mut self,
        name: &str,
        lists: impl IntoIterator<Item = Vec<T>>,
    ) -> Self {
        self.names.push(name.to_owned());
        let own = |list: Vec<T>| list.into_iter().map(Into::into).collect();
        let lists = lists.into_iter().map(own).collect();
        self.columns.push(OwnColumn::Lists(lists));
        self
    }
}

impl RowBatch for TableRows {
    fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    fn rows(&self) -> usize {
        match self.columns.first() {
            Some(OwnColumn::Single(cells)) => cells.len(),
            Some(OwnColumn::Lists(lists)) => lists.len(),
            None => 0,
        }
    }

    fn has_lists(&self, column: usize) -> bool {
        matches!(self.columns.get(column), Some(OwnColumn::Lists(_)))
    }

    fn read(&self, column: usize, to: &mut CellWriter) -> Result<(), InputError> {
        match &self.columns[column] {
            OwnColumn::Single(cells) => cells.iter().try_for_each(|cell| to.push(cell.cell())),
            OwnColumn::Lists(lists) => lists.iter().try_for_each(|list| {
                let mut elements = list.iter();
                elements.try_for_each(|element| to.push_element(element.cell()))?;
                to.end_list();
                Ok(())
            }),
        }
    }
}
