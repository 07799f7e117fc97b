//! Functions that are called while a training runs.

use std::any::Any;
use std::path::Path;

use shared_proto::job::{Best, EarlyStopping, Job, Plateau};

use super::history::{Entry, Epoch, History, Progress};
use crate::error::CommandError;
use crate::metrics::{Line, Tail};
use crate::train::Observer;

/// Functions that are called while a training runs, on a thread of their own. Workers do not wait for them.
pub trait Callback: Send {
    /// Changes the job before it begins.
    fn prepare(&mut self, _job: &mut Job) {}

    /// Receives the training loss and the pace, every `log_every` steps.
    fn progressed(&mut self, _progress: &Progress, _control: &mut Control) {}

    /// Receives the metrics of an evaluation.
    fn evaluated(&mut self, _epoch: &Epoch, _control: &mut Control) {}

    /// Receives the measurements after the end of a training that has not failed.
    fn ended(&mut self, _history: &History) {}
}

/// A callback's way to end the training.
#[derive(Clone, Debug, Default)]
pub struct Control {
    stop: Option<String>,
}

impl Control {
    /// Ends the training early and in good order: the workers finish the data that they hold, then one of them
    /// evaluates and saves the model. [`History::stopped`] has the reason; the first call's reason counts.
    pub fn stop(&mut self, why: impl Into<String>) {
        self.stop.get_or_insert(why.into());
    }
}

/// Returns a callback that calls this function with the metrics of each evaluation.
///
/// ```
/// use flambeau::{Error, Job, Trainer, on_evaluation};
///
/// # fn main() -> Result<(), Error> {
/// let stop = on_evaluation(|epoch, control| {
///     if epoch.metrics["accuracy"] > 0.5 {
///         control.stop("good enough");
///     }
/// });
/// let history = Trainer::new(Job::from_toml("epochs = 1000")?).callback(stop).fit()?;
/// assert_eq!(history.stopped.as_deref(), Some("good enough"));
/// # Ok(())
/// # }
/// ```
pub fn on_evaluation(act: impl FnMut(&Epoch, &mut Control) + Send) -> impl Callback {
    struct OnEvaluation<F>(F);

    impl<F: FnMut(&Epoch, &mut Control) + Send> Callback for OnEvaluation<F> {
        fn evaluated(&mut self, epoch: &Epoch, control: &mut Control) {
            (self.0)(epoch, control);
        }
    }

    OnEvaluation(act)
}

impl Callback for EarlyStopping {
    fn prepare(&mut self, job: &mut Job) {
        job.early_stopping = Some(self.clone());
    }
}

impl Callback for Plateau {
    fn prepare(&mut self, job: &mut Job) {
        job.plateau = Some(self.clone());
    }
}

impl Callback for Best {
    fn prepare(&mut self, job: &mut Job) {
        job.best = Some(self.clone());
    }
}

/// Hands the records of a run to callbacks.
pub(super) struct Callbacks<'a> {
    callbacks: &'a mut [Box<dyn Callback>],
    records: Tail,
    control: Control,
    /// The panic of a callback; `None` if no callback has panicked.
    panic: Option<Box<dyn Any + Send>>,
}

impl<'a> Callbacks<'a> {
    pub(super) fn new(callbacks: &'a mut [Box<dyn Callback>], run_dir: &Path) -> Self {
        Self {
            callbacks,
            records: Tail::new(run_dir),
            control: Control::default(),
            panic: None,
        }
    }

    /// Resumes the panic of a callback, if there is one. The caller first ends the members of the cluster.
    pub(super) fn resume_panic(&mut self) {
        if let Some(panic) = self.panic.take() {
            std::panic::resume_unwind(panic);
        }
    }

    /// Hands over the records since the last call.
    ///
    /// # Errors
    /// If the records cannot be read; [`CommandError::Interrupted`] if a callback has panicked.
    pub(super) fn catch_up(&mut self) -> Result<(), CommandError> {
        if self.panic.is_some() {
            return Err(CommandError::Interrupted);
        }
        let lines = self.records.read()?;
        if lines.is_empty() {
            return Ok(());
        }
        let (callbacks, control) = (&mut *self.callbacks, &mut self.control);
        // A callback may start a runtime of its own, which cannot be done within this one.
        let handed = std::thread::scope(|scope| {
            let hand_over = || {
                for entry in lines.into_iter().filter_map(Line::into_entry) {
                    for callback in &mut *callbacks {
                        match &entry {
                            Entry::Epoch(epoch) => callback.evaluated(epoch, control),
                            Entry::Progress(more) => callback.progressed(more, control),
                        }
                    }
                }
            };
            scope.spawn(hand_over).join()
        });
        handed.map_err(|panic| {
            self.panic = Some(panic);
            CommandError::Interrupted
        })
    }

    /// Returns the reason why a callback has stopped the training; `None` if none has.
    pub(super) fn stopped(self) -> Option<String> {
        self.control.stop
    }
}

impl Observer for Callbacks<'_> {
    fn look(&mut self) -> Result<bool, CommandError> {
        self.catch_up()?;
        Ok(self.control.stop.is_some())
    }
}
