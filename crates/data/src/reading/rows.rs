//! Rows of CSV files (RFC 4180) and their fields. A quote counts only at the beginning of a field, as in the crate
//! `csv`, with which the tests compare this module. That crate examines each byte in turn; this module finds the
//! relevant bytes with SIMD instructions.

use std::borrow::Cow;
use std::ops::Range;

use memchr::{memchr, memchr_iter, memchr3};

/// A row in a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// The bytes of the row, without the end of the line.
    pub(crate) bytes: Range<usize>,
    /// True if a field is quoted.
    pub(crate) quoted: bool,
    /// What ends the row.
    pub(crate) end: End,
}

/// The end of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The end of a line.
    Line,
    /// The end of the text.
    Text,
    /// The end of the text, within quotes.
    OpenQuote,
}

/// Returns the first row of a text from the byte `from` on; `None` if no row is left. Blank lines are no rows.
pub(crate) fn next_row(text: &[u8], from: usize, delimiter: u8) -> Option<Row> {
    let is_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let start = from + text[from..].iter().position(|byte| !is_end(byte))?;
    let row = |to: usize, quoted, end| {
        Some(Row {
            bytes: start..to,
            quoted,
            end,
        })
    };
    let (mut at, mut quoted) = (start, false);
    while let Some(found) = memchr3(b'"', b'\n', b'\r', &text[at..]) {
        at += found;
        if text[at] != b'"' {
            return row(at, quoted, End::Line);
        }
        if at == start || text[at - 1] == delimiter {
            quoted = true;
            match closing_quote(text, at) {
                Some(closing) => at = closing,
                None => return row(text.len(), quoted, End::OpenQuote),
            }
        }
        at += 1;
    }
    row(text.len(), quoted, End::Text)
}

/// Returns the index of the quote that closes the quote at `opening`; `None` if the quote is left open. Two adjacent
/// quotes stand for one quote, and close nothing.
fn closing_quote(text: &[u8], opening: usize) -> Option<usize> {
    let mut at = opening + 1;
    loop {
        at += memchr(b'"', &text[at..])?;
        match text.get(at + 1) {
            Some(b'"') => at += 2,
            _ => return Some(at),
        }
    }
}

/// Passes the index and the text of each field of a row to `each`, without surrounding quotes and blanks. Returns the
/// number of fields.
///
/// # Errors
/// Those of `each`.
pub(crate) fn each_field<E>(
    row: &str,
    quoted: bool,
    delimiter: u8,
    mut each: impl FnMut(usize, &str) -> Result<(), E>,
) -> Result<usize, E> {
    let (mut start, mut count) = (0, 0);
    if quoted {
        loop {
            let (field, end) = field(row, start, delimiter);
            each(count, field.trim())?;
            count += 1;
            match end {
                Some(end) => start = end + 1,
                None => return Ok(count),
            }
        }
    }
    for end in memchr_iter(delimiter, row.as_bytes()) {
        each(count, trim(&row[start..end]))?;
        start = end + 1;
        count += 1;
    }
    each(count, trim(&row[start..]))?;
    Ok(count + 1)
}

/// Returns a text without surrounding blanks. For most fields, a look at the first and the last byte is enough.
fn trim(field: &str) -> &str {
    match (field.as_bytes().first(), field.as_bytes().last()) {
        (Some(b'!'..=b'~'), Some(b'!'..=b'~')) => field,
        _ => field.trim(),
    }
}

/// Returns the field of a row that begins at the byte `start`, and the index of the delimiter behind the field, if
/// there is one.
fn field(row: &str, start: usize, delimiter: u8) -> (Cow<'_, str>, Option<usize>) {
    let bytes = row.as_bytes();
    let delimiter_from = |at: usize| memchr(delimiter, &bytes[at..]).map(|found| at + found);
    if bytes.get(start) != Some(&b'"') {
        let end = delimiter_from(start);
        return (row[start..end.unwrap_or(row.len())].into(), end);
    }
    let closing = closing_quote(bytes, start).unwrap_or(row.len());
    let inner = &row[start + 1..closing];
    let behind = (closing + 1).min(row.len());
    let end = delimiter_from(behind);
    let rest = &row[behind..end.unwrap_or(row.len())];
    let inner = match inner.contains('"') {
        true => Cow::Owned(inner.replace("\"\"", "\"")),
        false => Cow::Borrowed(inner),
    };
    match rest.is_empty() {
        true => (inner, end),
        false => (Cow::Owned(inner.into_owned() + rest), end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::convert::Infallible;

    /// Returns the rows of a text with the line of each, as this file finds them.
    fn ours(text: &str) -> Vec<(u64, Vec<String>)> {
        let (mut rows, mut at) = (Vec::new(), 0);
        while let Some(row) = next_row(text.as_bytes(), at, b',') {
            let before = &text.as_bytes()[..row.bytes.start];
            let line = 1 + memchr_iter(b'\n', before).count() as u64;
            let mut fields = Vec::new();
            let count = each_field(
                &text[row.bytes.clone()],
                row.quoted,
                b',',
                |number, field| {
                    assert_eq!(number, fields.len());
                    fields.push(field.to_owned());
                    Ok::<_, Infallible>(())
                },
            );
            assert_eq!(count.unwrap(), fields.len());
            rows.push((line, fields));
            at = row.bytes.end;
        }
        rows
    }

    fn of_the_crate(text: &str) -> Vec<Vec<String>> {
        let mut reader = ::csv::ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .trim(::csv::Trim::All)
            .from_reader(text.as_bytes());
        let records = reader.records().map(Result::unwrap);
        let fields = records.map(|record| record.iter().map(str::to_owned).collect());
        fields.collect()
    }

    proptest! {
        #[test]
        fn rows_and_fields_are_those_of_the_crate_csv(text in "[a,\"\n\r \u{e9}]{0,60}") {
            let fields: Vec<Vec<String>> = ours(&text).into_iter().map(|(_, fields)| fields).collect();
            prop_assert_eq!(fields, of_the_crate(&text), "{:?}", text);
        }
    }

    #[test]
    fn rows_have_the_line_on_which_they_begin() {
        let lines: Vec<u64> = ours("a\n\n\"b\nb\"\r\n\r\nc")
            .into_iter()
            .map(|(line, _)| line)
            .collect();
        assert_eq!(lines, [1, 3, 6]);
    }

    #[test]
    fn a_quote_that_is_left_open_is_told() {
        let end = |text: &str| next_row(text.as_bytes(), 0, b',').unwrap().end;
        assert_eq!(end("a,\"b\n"), End::OpenQuote);
        assert_eq!(end("a,\"b\"\"\n"), End::OpenQuote);
        assert_eq!(end("a,\"b\""), End::Text);
        assert_eq!(end("a,5\" x 3\"\n"), End::Line);
    }
}
