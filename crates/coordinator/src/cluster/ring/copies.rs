//! The copies of values from which a member of the ring writes its part of a checkpoint.

use shared_proto::ids::Task;

use crate::cluster::Cluster;
use crate::cluster::training::Work;

impl Cluster {
    /// Returns the checkpoint for which a worker is to copy its values, or to help the one that does, if there is one. `copied` is
    /// the newest one for which it has, in the present ring.
    pub(in crate::cluster) fn copy_for_checkpoint(
        &mut self,
        task: Task,
        copied: Option<u64>,
    ) -> Option<Work> {
        let shard = self.part_of_ring() as u32;
        let all_help = self.job.strategy.optimizer_copies.is_some();
        let at_work = self.saving.at_work.as_mut()?;
        let number = at_work.manifest.number;
        let writer = at_work.writer.as_mut()?;
        let (writes, has_copied) = (writer.task == task, copied == Some(number));
        writer.has_copy |= writes && has_copied;
        let helps = !writes && all_help && !has_copied;
        let copies = !writer.has_copy && (writes || helps);
        copies.then_some(Work::CopyValues {
            number,
            block_elements: at_work.manifest.block_elements,
            shard,
            helps,
        })
    }

    /// Returns whether the next steps must wait for a copy of the values.
    pub(in crate::cluster) fn awaits_copy(&self) -> bool {
        let at_work = self.saving.at_work.as_ref();
        let writer = at_work.and_then(|at_work| at_work.writer);
        writer.is_some_and(|writer| !writer.has_copy)
    }

    /// Gives up the checkpoint that a worker writes, because the worker is gone.
    pub(in crate::cluster) fn give_up_copy_of(&mut self, gone: Task) {
        let at_work = self.saving.at_work.as_ref();
        let writer = at_work.and_then(|at_work| at_work.writer);
        if writer.is_some_and(|writer| writer.task == gone) {
            self.give_up_saving();
            // The next ring writes another one.
            self.saving.begun = None;
        }
    }
}
