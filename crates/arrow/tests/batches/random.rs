//! Random rows of all types: as a record batch, and as the lines of a CSV file that say the same.

use super::*;
use arrow_array::TimestampNanosecondArray;
use proptest::prelude::*;

type Row = (
    Option<i64>,
    Option<u64>,
    Option<f64>,
    Option<i128>,
    Option<String>,
    Option<bool>,
    Option<i64>,
    Vec<u64>,
);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    use proptest::option::weighted;
    let integer = prop_oneof![any::<i64>(), -3..3i64, Just((1 << 53) + 1), Just(i64::MIN)];
    let double = prop_oneof![
        -1e6..1e6f64,
        Just(5.0),
        Just(-0.0),
        Just(1e-30),
        Just(123_456_789.25)
    ];
    let text = "[a-zé]{1,4}( [a-z]{1,3})?|[0-9]{1,3}(\\.[0-9])?|\"[,;]'";
    let row = (
        weighted(0.8, integer),
        weighted(0.8, any::<u64>()),
        weighted(0.8, double),
        weighted(0.8, -1_000_000..1_000_000i128),
        weighted(0.8, text),
        weighted(0.8, any::<bool>()),
        // Years 1800 to 2200, in nanoseconds.
        weighted(
            0.8,
            -5_364_662_400_000_000_000..7_258_118_400_000_000_000i64,
        ),
        prop::collection::vec(any::<u64>().prop_map(|id| id >> 1), 0..4),
    );
    prop::collection::vec(row, 4..20)
}

fn batch(rows: &[Row]) -> RecordBatch {
    let mut lists = ListBuilder::new(arrow_array::builder::UInt64Builder::new());
    for row in rows {
        lists.append_value(row.7.iter().copied().map(Some));
    }
    let decimals: Decimal128Array = rows.iter().map(|row| row.3).collect();
    let times: TimestampNanosecondArray = rows.iter().map(|row| row.6).collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "category",
            Arc::new(rows.iter().map(|row| row.0).collect::<Int64Array>()),
        ),
        (
            "hashed",
            Arc::new(rows.iter().map(|row| row.1).collect::<UInt64Array>()),
        ),
        (
            "number",
            Arc::new(rows.iter().map(|row| row.2).collect::<Float64Array>()),
        ),
        (
            "amount",
            Arc::new(decimals.with_precision_and_scale(12, 3).unwrap()),
        ),
        (
            "text",
            Arc::new(
                rows.iter()
                    .map(|row| row.4.as_deref())
                    .collect::<StringViewArray>(),
            ),
        ),
        (
            "truth",
            Arc::new(rows.iter().map(|row| row.5).collect::<BooleanArray>()),
        ),
        ("time", Arc::new(times.with_timezone("UTC"))),
        ("ids", Arc::new(lists.finish())),
        (
            "y",
            Arc::new(Int64Array::from_iter_values(
                (0..rows.len() as i64).map(|i| i % 2),
            )),
        ),
    ];
    let fields = columns
        .iter()
        .map(|(n, a)| Field::new(*n, a.data_type().clone(), true));
    let schema = Schema::new(fields.collect::<Vec<_>>());
    RecordBatch::try_new(
        Arc::new(schema),
        columns.into_iter().map(|(_, a)| a).collect(),
    )
    .unwrap()
}

fn csv(rows: &[Row]) -> String {
    fn cell<T>(value: &Option<T>, text: impl Fn(&T) -> String) -> String {
        let text = value.as_ref().map_or("NA".to_owned(), text);
        format!("\"{}\"", text.replace('"', "\"\""))
    }
    let mut all = "category,hashed,number,amount,text,truth,time,ids,y\r\n".to_owned();
    for (i, row) in rows.iter().enumerate() {
        let amount = |n: &i128| {
            format!(
                "{}{}.{:03}",
                if *n < 0 { "-" } else { "" },
                n.abs() / 1000,
                n.abs() % 1000
            )
        };
        let time = |ns: &i64| {
            let seconds = ns.div_euclid(1_000_000_000);
            let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
            let (year, month, day) = civil(days);
            let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
            let fraction = ns.rem_euclid(1_000_000_000);
            format!(
                "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:09}Z"
            )
        };
        let ids: Vec<String> = row.7.iter().map(u64::to_string).collect();
        let cells = [
            cell(&row.0, i64::to_string),
            cell(&row.1, u64::to_string),
            cell(&row.2, f64::to_string),
            cell(&row.3, amount),
            cell(&row.4, String::clone),
            cell(&row.5, |truth| {
                if *truth { "True" } else { "False" }.to_owned()
            }),
            cell(&row.6, time),
            ids.join(" "),
            (i % 2).to_string(),
        ];
        all += &cells.join(",");
        all += "\r\n";
    }
    all
}

/// Returns year, month and day of a number of days since 1970 (Hinnant, "chrono-Compatible Low-Level Date Algorithms", 2013).
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (
        day - (153 * month + 2) / 5 + 1,
        if month < 10 { month + 3 } else { month - 9 },
    );
    (year + era * 400 + i64::from(month <= 2), month, day)
}

fn job(separator: &str) -> Job {
    let text = format!(
        "[data]\nlabel = \"y\"\nmissing = \"mean\"\nheld_out = 0.25\n[data.columns]\ncategory = {{ type = \"category\" }}\nhashed = {{ type = \"category\", buckets = 1000 }}\ntext = {{ type = \"category\" }}\ntruth = {{ type = \"category\" }}\ntime = {{ type = \"date\" }}\nids = {{ type = \"id\", hash = false{separator} }}"
    );
    Job::from_toml(&text).unwrap()
}

proptest! {
    #[test]
    fn any_rows_give_the_samples_of_a_file(rows in rows(), cut in 0..4usize) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.csv");
        std::fs::write(&file, csv(&rows)).unwrap();
        let mut of_file = job(", separator = \" \"");
        of_file.data.dir = Some(file);
        let of_file = Csv::open(&setup(&of_file, Purpose::Training)).unwrap();
        let (job, batch) = (job(""), batch(&rows));
        let parts = [batch.slice(0, cut), batch.slice(cut, rows.len() - cut)];
        let of_batches = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "rows", parts);
        prop_assert_eq!(all(of_batches.unwrap()), all(of_file));
    }
}
