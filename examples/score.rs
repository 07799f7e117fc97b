//! Scores samples as an online service does: the model's weights are in this process, and each request reads the rows of
//! its samples from running servers. Prints the median and the 99th percentile of a request's time.
//!
//!     flambeau train examples/jobs/clicks.toml --lookups --run-dir runs/clicks
//!     flambeau checkpoint export runs/clicks --output weights.safetensors
//!     cargo run --release --example score -- runs/clicks weights.safetensors HOST:PORT,HOST:PORT
//!
//! `flambeau status --json` has the servers' addresses, as `lookup_address`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use flambeau::{App, Scoring};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The samples of a request: the candidates that a page or an auction ranks.
const CANDIDATES: u64 = 64;

const REQUESTS: usize = 2000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [run_dir, weights, servers] = &arguments[..] else {
        eprintln!("usage: score RUN_DIR WEIGHTS.safetensors HOST:PORT,...");
        return ExitCode::FAILURE;
    };
    let scoring = Scoring {
        run_dir: PathBuf::from(run_dir),
        weights: PathBuf::from(weights),
        servers: servers.split(',').map(str::to_owned).collect(),
        patience: Duration::from_secs(5),
        ..Scoring::default()
    };
    match measure(&scoring) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("score: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(scoring: &Scoring) -> Result<(), Box<dyn std::error::Error>> {
    let mut scorer = App::new().scorer(scoring)?;
    let starts = (0..scorer.samples().saturating_sub(CANDIDATES)).step_by(CANDIDATES as usize);
    let mut times = Vec::with_capacity(REQUESTS);
    let mut sum = 0.0;
    for start in starts.cycle().take(REQUESTS) {
        let began = Instant::now();
        let scores = scorer.scores(start..start + CANDIDATES)?;
        times.push(began.elapsed());
        sum += scores.iter().sum::<f32>() / scores.len() as f32;
    }
    if times.is_empty() {
        return Err(format!("the data has fewer than {CANDIDATES} held-out samples").into());
    }
    times.sort_unstable();
    let count = times.len();
    let milliseconds =
        |share: f64| times[((count - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!(
        "{count} requests of {CANDIDATES} samples: median {:.2} ms, p99 {:.2} ms; mean score {:.4}",
        milliseconds(0.5),
        milliseconds(0.99),
        sum / count as f32,
    );
    Ok(())
}
