//! Trains on the result of a query: the houses from a certain area on, each with the mean price of its city.
//!
//! The command line is Flambeau's, as in `engine train job.toml --workers 2`; a job has `data.kind = "houses"`.

use std::process::ExitCode;

use datafusion::arrow::array::RecordBatch;
use datafusion::error::DataFusionError;
use datafusion::functions_aggregate::expr_fn::avg;
use datafusion::prelude::{CsvReadOptions, JoinType, SessionContext, col, lit};
use flambeau::{App, DataSetup, Dataset, InputError, Source};

struct Houses;

impl Source for Houses {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.map_err(|error| InputError::Invalid(error.to_string()))?;
        let found = runtime.block_on(query(&setup.dir()?.to_string_lossy()));
        let found = found.map_err(|error| InputError::Invalid(error.to_string()))?;
        flambeau_arrow::dataset(setup, "the houses", found)
    }
}

async fn query(folder: &str) -> Result<Vec<RecordBatch>, DataFusionError> {
    let context = SessionContext::new();
    let table = async |name| {
        let file = format!("{folder}/{name}.csv");
        context.read_csv(file, CsvReadOptions::new()).await
    };
    let houses = table("houses").await?.filter(col("area").gt_eq(lit(20)))?;
    let cities = houses.clone().aggregate(vec![col("city")], vec![avg(col("price")).alias("mean")])?;
    let cities = cities.select(vec![col("city").alias("town"), col("mean")])?;
    houses
        .join(cities, JoinType::Inner, &["city"], &["town"], None)?
        .sort(vec![col("number").sort(true, false)])?
        .select_columns(&["area", "city", "mean", "price"])?
        .collect()
        .await
}

fn main() -> ExitCode {
    App::new().data::<Houses>("houses").main()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::process::Command;

    use datafusion::arrow::util::display::array_value_to_string;
    use flambeau::{Job, TableRows, Trainer};

    use super::*;

    /// A price is a hundredth of the area, and 2 more in Bern. Houses below 20 are not in the data.
    fn write(folder: &std::path::Path) {
        let mut houses = "number,area,city,price\n".to_owned();
        for number in 0..2000 {
            let (area, city) = (10 + number * 37 % 190, if number % 3 == 0 { "Bern" } else { "Basel" });
            let price = f64::from(area) / 100.0 + if city == "Bern" { 2.0 } else { 0.0 };
            let price = if area < 20 { 1000.0 } else { price };
            writeln!(houses, "{number},{area},{city},{price}").unwrap();
        }
        std::fs::write(folder.join("houses.csv"), houses).unwrap();
    }

    fn job(folder: &std::path::Path) -> String {
        format!(
            r#"
            epochs = 20
            [data]
            kind = "houses"
            dir = {folder:?}
            label = "price"
            target = "number"
            label_transform = "standardise"
            columns = {{ city = {{ type = "category" }} }}
            [optimizer]
            name = "adam"
            learning_rate = 0.01
            "#
        )
    }

    #[test]
    fn a_trainer_learns_from_a_query_and_predicts_rows() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let mut job = Job::from_toml(&job(folder.path())).unwrap();
        job.run_dir = Some(folder.path().join("run"));
        let mut trainer = Trainer::new(job).source::<Houses>();
        let history = trainer.fit().unwrap();
        assert!(history.last("rmse").unwrap() < 0.1, "{history:?}");
        let rows = TableRows::new()
            .column("area", [50, 150])
            .column("city", ["Basel", "Bern"])
            .column("mean", [1.1, 3.1]);
        let prices = trainer.last().unwrap().predict_rows(rows).unwrap();
        assert!((prices[0][0] - 0.5).abs() < 0.3, "{prices:?}");
        assert!((prices[1][0] - 3.5).abs() < 0.3, "{prices:?}");
    }

    #[test]
    fn a_query_and_its_rows_in_a_file_make_the_same_model() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let batches = runtime.block_on(query(folder.path().to_str().unwrap())).unwrap();
        let mut rows = "area,city,mean,price\n".to_owned();
        for batch in &batches {
            for row in 0..batch.num_rows() {
                let columns = batch.columns().iter();
                let cells: Vec<_> = columns.map(|column| array_value_to_string(column, row).unwrap()).collect();
                writeln!(rows, "{}", cells.join(",")).unwrap();
            }
        }
        let file = folder.path().join("rows.csv");
        std::fs::write(&file, rows).unwrap();
        let model = |kind: &str, dir: &std::path::Path| {
            let job = Job::from_toml(&job(folder.path())).unwrap();
            let mut job = job.with("strategy.mode=sync").unwrap();
            let run = folder.path().join(kind);
            job.epochs = 2;
            job.data.kind = kind.to_owned();
            job.data.dir = Some(dir.to_owned());
            job.run_dir = Some(run.clone());
            let trainer = Trainer::new(job);
            let mut trainer = match kind {
                "houses" => trainer.source::<Houses>(),
                _ => trainer,
            };
            trainer.fit().unwrap();
            std::fs::read(run.join("model.safetensors")).unwrap()
        };
        assert!(model("houses", folder.path()) == model("csv", &file));
    }

    #[test]
    fn the_processes_of_a_cluster_learn_from_a_query() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let file = folder.path().join("job.toml");
        std::fs::write(&file, job(folder.path())).unwrap();
        let program = std::env::var_os("ENGINE_PROGRAM").expect("the program, which tests/engine/run names");
        let run = folder.path().join("run");
        let output = Command::new(program)
            .args(["train", "--workers", "2", "--ps", "2", "--json", "--run-dir"])
            .args([&run, &file])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let summary = String::from_utf8(output.stdout).unwrap();
        let rmse = summary.split("\"rmse\":").nth(1).expect(&summary);
        let rmse: f64 = rmse.split([',', '}']).next().unwrap().trim().parse().unwrap();
        assert!(rmse < 0.3, "{summary}");
    }
}
