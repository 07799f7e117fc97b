//! The copies of values from which a member of the ring writes its part of a checkpoint.

use std::time::Instant;

use shared_proto::ids::Task;

use crate::Cluster;
use crate::work::Work;

impl Cluster {
    /// Notes the newest checkpoint for which a worker has copied its values.
    pub(crate) fn note_copied(&mut self, task: Task, copied: Option<u64>) {
        if let Some(at_work) = &mut self.saving.at_work
            && let Some(writer) = &mut at_work.writer
        {
            let number = at_work.manifest.number;
            writer.has_copy |= writer.task == task && copied == Some(number);
        }
    }

    /// Returns the order to copy values for a checkpoint, or to help the member that copies them; `None` if there is
    /// `None` for this worker. `copied` is the newest checkpoint for which the worker has done so in the present ring.
    pub(crate) fn copy_for_checkpoint(&self, task: Task, copied: Option<u64>) -> Option<Work> {
        let at_work = self.saving.at_work.as_ref()?;
        let writer = at_work.writer.filter(|writer| !writer.has_copy)?;
        let number = at_work.manifest.number;
        let helps = writer.task != task;
        let all_help = self.job.strategy.optimizer_copies.is_some();
        if helps && (!all_help || copied == Some(number)) {
            return None;
        }
        Some(Work::CopyValues {
            number,
            block_elements: at_work.manifest.block_elements,
            shard: self.part_of_ring() as u32,
            helps,
        })
    }

    /// Returns the worker that copies its values, for which the next steps wait, and the time of its last progress.
    pub(crate) fn copier(&self) -> Option<(Task, Instant)> {
        let at_work = self.saving.at_work.as_ref()?;
        let writer = at_work.writer.filter(|writer| !writer.has_copy)?;
        Some((writer.task, at_work.moved))
    }

    /// Gives up the checkpoint that a worker writes, because the worker is gone.
    pub(crate) fn give_up_copy_of(&mut self, gone: Task) {
        let at_work = self.saving.at_work.as_ref();
        let writer = at_work.and_then(|at_work| at_work.writer);
        if writer.is_some_and(|writer| writer.task == gone) {
            self.give_up_saving();
            // The next ring writes another one.
            self.saving.begun = None;
        }
    }
}
