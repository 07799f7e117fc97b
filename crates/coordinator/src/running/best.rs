//! Carries the best weights of a run over to a new run that begins with its checkpoint.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Value;
use shared_proto::ids::RunNumber;
use shared_proto::job::run_dir;
use storage::Location;

/// Copies the best weights of the run with checkpoints at `location` to the run directory `dir`, with their record as
/// one of the new run. Only better weights then replace them, as if the earlier run had gone on. Does nothing if there
/// are no best weights, if `dir` has some, or if they were evaluated after the checkpoint. `evaluated` is the last
/// pass, from 1, of which the checkpoint has an evaluation; 0 if it has none.
pub(super) async fn carry(
    location: &str,
    dir: &Path,
    run: RunNumber,
    evaluated: u32,
) -> io::Result<()> {
    let Some(from) = beside(location) else {
        return Ok(());
    };
    let record = match tokio::fs::read(from.join(run_dir::BEST_RECORD)).await {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut record: Value = serde_json::from_slice(&record)?;
    let epoch = record["epoch"].as_u64();
    let (weights, place) = (dir.join(run_dir::BEST), dir.join(run_dir::BEST_RECORD));
    if epoch.is_none_or(|epoch| epoch > evaluated.into()) || tokio::fs::try_exists(&place).await? {
        return Ok(());
    }
    record["run"] = format!("{:016x}", run.0).into();
    tokio::fs::copy(from.join(run_dir::BEST), weights).await?;
    // A record that is cut short would keep a later start from copying.
    let partial = place.with_extension("partial");
    tokio::fs::write(&partial, record.to_string()).await?;
    tokio::fs::rename(partial, place).await
}

/// Returns the run directory with the checkpoints at `location`. `None` if the checkpoints are not in a run directory.
fn beside(location: &str) -> Option<PathBuf> {
    match Location::parse(location).ok()? {
        // Other places of checkpoints are no part of a run directory.
        Location::Folder(checkpoints) if checkpoints.ends_with(run_dir::CHECKPOINTS) => {
            checkpoints.parent().map(Path::to_owned)
        }
        Location::Folder(_) => None,
        Location::Bucket { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_best_weights_of_a_run_go_with_its_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        for run in ["before", "after", "another"] {
            std::fs::create_dir_all(of(run).join(run_dir::CHECKPOINTS)).unwrap();
        }
        let location = of("before").join(run_dir::CHECKPOINTS);
        let carry = async |to: &str, evaluated| {
            let location = location.to_str().unwrap();
            carry(location, &of(to), RunNumber(0xab), evaluated).await
        };
        // There are none.
        carry("after", 9).await.unwrap();
        std::fs::write(of("before").join(run_dir::BEST), "weights").unwrap();
        let record = r#"{"metric":"accuracy","value":0.5,"epoch":3,"run":"01"}"#;
        std::fs::write(of("before").join(run_dir::BEST_RECORD), record).unwrap();
        // They come after the checkpoint.
        carry("after", 2).await.unwrap();
        assert!(!of("after").join(run_dir::BEST).exists());
        carry("after", 3).await.unwrap();
        let taken = std::fs::read(of("after").join(run_dir::BEST)).unwrap();
        assert_eq!(taken, b"weights");
        let record = std::fs::read(of("after").join(run_dir::BEST_RECORD)).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!(
            (&record["epoch"], &record["value"]),
            (&3.into(), &0.5.into())
        );
        assert_eq!(record["run"], "00000000000000ab");
        // What is there stays.
        std::fs::write(of("after").join(run_dir::BEST), "other weights").unwrap();
        carry("after", 3).await.unwrap();
        let stays = std::fs::read(of("after").join(run_dir::BEST)).unwrap();
        assert_eq!(stays, b"other weights");
    }
}
