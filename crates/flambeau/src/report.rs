//! `report.html` of a run: its curves, its summary and its settings, as one file that a browser shows without a network.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use coordinator::History;
use daemon::{clusters, outln};
use serde_json::{Value, json};
use shared_proto::job::{Job, run_dir};

use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory of a job that has ended.
    run_dir: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let dir = &arguments.run_dir;
    if !write(dir)? {
        let missing = io::Error::other(
            "it is missing: the run has not ended, or this is not a run directory",
        );
        return Err(CommandError::file(&dir.join(run_dir::SUMMARY))(missing));
    }
    outln!("{}", dir.join(run_dir::REPORT).display());
    Ok(())
}

/// Writes the report of a run. Returns false without writing if the run has no summary, because it has not ended.
pub(crate) fn write(dir: &Path) -> Result<bool, CommandError> {
    let path = dir.join(run_dir::SUMMARY);
    let summary = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        summary => summary.map_err(CommandError::file(&path))?,
    };
    let summary: Value = serde_json::from_str(&summary).map_err(|error| CommandError::Content {
        path,
        reason: error.to_string(),
    })?;
    let metrics = dir.join(run_dir::METRICS);
    let history = History::read(dir).map_err(CommandError::file(&metrics))?;
    // The settings are only shown, so those of another release will do.
    let settings = std::fs::read_to_string(dir.join(run_dir::JOB)).unwrap_or_default();
    let name = Job::parse(&settings).map_or_else(|_| "a run".to_owned(), |job| job.name);
    let place = dir.file_name().unwrap_or(dir.as_os_str());
    let page = coordinator::report(&json!({
        "job": name,
        "run_dir": place.display().to_string(),
        "version": env!("CARGO_PKG_VERSION"),
        "written": clusters::now(),
        "summary": summary,
        "history": history.to_json(),
        "settings": settings,
    }));
    let path = dir.join(run_dir::REPORT);
    std::fs::write(&path, page).map_err(CommandError::file(&path))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_curves_summary_and_settings() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        put(
            run_dir::METRICS,
            r#"{"event":"evaluation","seconds":1.0,"epoch":1,"steps":5,"samples":9,"metrics":{"auc":0.75}}"#,
        );
        put(run_dir::JOB, "name = \"my job\"\n");
        assert!(!write(dir.path()).unwrap(), "it has not ended");
        put(run_dir::SUMMARY, r#"{"mode":"sync","steps":5}"#);
        assert!(write(dir.path()).unwrap());
        let page = std::fs::read_to_string(dir.path().join(run_dir::REPORT)).unwrap();
        let data = page.split("id=\"data\">").nth(1).unwrap();
        let data = data.split("</script>").next().unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["job"], "my job");
        assert_eq!(data["summary"]["steps"], 5);
        assert_eq!(data["history"]["evaluations"][0]["metrics"]["auc"], 0.75);
        assert_eq!(data["settings"], "name = \"my job\"\n");
    }
}
