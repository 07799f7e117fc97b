//! The arguments of the benchmark.

use std::time::Duration;

/// The models that the benchmark measures, and for how long.
#[derive(Debug, PartialEq)]
pub(crate) struct Arguments {
    /// The names of models; if there are none, all are measured.
    pub(crate) names: Vec<String>,
    /// The time for each model.
    pub(crate) time: Duration,
}

impl Arguments {
    /// Reads arguments. `known` has the names of all models, and `threads` is the number of threads that candle uses.
    ///
    /// # Errors
    /// If an argument is wrong, or if there is more than one thread: the benchmark measures the time of one.
    pub(crate) fn read(
        arguments: impl IntoIterator<Item = String>,
        known: &[&str],
        threads: usize,
    ) -> Result<Self, String> {
        if threads != 1 {
            return Err(format!(
                "the benchmark measures one thread, but candle uses {threads}; set RAYON_NUM_THREADS=1"
            ));
        }
        let mut read = Self {
            names: Vec::new(),
            time: Duration::from_secs(5),
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                // Cargo adds it.
                "--bench" => {}
                "--seconds" => read.time = seconds(arguments.next())?,
                name if known.contains(&name) => read.names.push(argument),
                other => {
                    let known = known.join(", ");
                    return Err(format!(
                        "there is no model or flag `{other}`; the models are {known}, and the flag is --seconds"
                    ));
                }
            }
        }
        Ok(read)
    }
}

fn seconds(argument: Option<String>) -> Result<Duration, String> {
    let argument = argument.unwrap_or_default();
    let time = argument.parse().ok();
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or(format!(
        "--seconds takes a number of seconds, at least 0, and not `{argument}`"
    ))
}
