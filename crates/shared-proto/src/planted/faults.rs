//! The faults, and the choice of the planted one: by thread, for the simulation, in which all hosts share a thread; or
//! by process, through its environment.

use std::cell::Cell;
use std::sync::OnceLock;

/// The environment variable that names the fault of a process.
pub const VARIABLE: &str = "PLANTED_FAULT";

macro_rules! faults {
    ($($list:ident { $(#[doc = $what:literal] $fault:ident,)* })*) => {
        /// A fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $($(#[doc = $what] $fault,)*)*
        }

        impl Fault {
            $(
                /// The faults that this kind of test finds.
                pub const $list: &[Self] = &[$(Self::$fault),*];
            )*
            const ALL: &[&[Self]] = &[$(Self::$list),*];
        }
    };
}

faults! {
    IN_SIMULATION {
        /// An update leaves the version of its block as it is.
        SameVersion,
        /// A server takes pushes that it has taken before.
        NoDedup,
        /// A checkpoint lacks the watermarks of its blocks.
        MarksNotSaved,
        /// A server acknowledges some pushes that it does not apply.
        AcknowledgesUnapplied,
        /// A server answers pulls beyond the bound.
        NoGate,
        /// A server answers pulls that are one step beyond the bound.
        LooseBound,
        /// A worker that computes ahead asks for weights with the clock of the previous step.
        AsksByEarlierClock,
        /// The min clock is that of the fastest worker.
        FastestMinClock,
        /// A server commits a step on only some of its blocks.
        HalfStep,
        /// A server commits its newest step again after its lease has expired.
        CommitsAgain,
        /// A commit lacks one of its contributors.
        ForgottenContributor,
        /// The coordinator's leases never end.
        EndlessLeases,
        /// The data of a dead worker is not handed out again.
        LostData,
        /// The data of a dead worker is handed out twice.
        SplitTwice,
        /// A coordinator that starts again numbers its views from 0.
        OldViews,
        /// Generations do not grow when a process registers again.
        OneGeneration,
        /// The coordinator answers before its state is persisted.
        AnsweredBeforeKept,
        /// A change of the coordinator's state counts as persisted before it is on the disk.
        LogNotSynced,
        /// A restarted coordinator takes damage of its log for a torn write, and resumes from an older state.
        DamageTakenForTheEnd,
        /// The coordinator answers a finished part of a step before the part is persisted.
        PartForgotten,
        /// A job that goes back to a checkpoint keeps its later progress.
        KeepsProgress,
        /// A server loads an older checkpoint than it is told to.
        OlderCheckpoint,
        /// A server that was replaced continues to answer, workers stay with it, and their steps count.
        NeverReplaced,
        /// A manifest is written when the first shard has reported.
        EarlyManifest,
        /// A checkpoint of sync mode lacks the newest step that it is to have.
        CheckpointLacksStep,
        /// The saved model stays as it is after a shard has gone back at the end.
        StaleModel,
        /// Lost updates that workers report are not counted.
        SilentLosses,
        /// The lost updates of dead workers are not derived.
        ForgottenLives,
        /// A session does not ask which pushes a restored shard has.
        ReconcilesUnasked,
        /// A server reports one push more than it has taken.
        OutcomeOverstated,
        /// A session does not send unanswered requests again.
        SentOnce,
        /// A pull of rows creates those that are not there.
        ReadsCreate,
        /// If several workers have gradients of a row in a step, only the last gradient counts.
        LastContributorsRow,
        /// A worker takes the rows of one bucket for those of another.
        RowsMisplaced,
        /// A checkpoint lacks a row of each bucket.
        RowNotSaved,
        /// A bucket begins without rows after a restore.
        RowsNotRestored,
        /// A checkpoint has only the rows that have changed since the last attempt, although that failed.
        ForgottenChanges,
        /// A row that has changed counts as not changed once it is on disk.
        SpilledAsUnchanged,
        /// After a restore, a bucket has only the rows of the newest checkpoint, not of those that it builds on.
        NewestRowsAlone,
        /// An id gets a row with its first gradient, whatever the table's admission.
        AdmitsAtOnce,
        /// A checkpoint lacks the counts by which ids are admitted.
        SightsNotSaved,
        /// The rows that had a gradient last are evicted first.
        EvictsNewest,
        /// Rows are not evicted for their age.
        NeverTooOld,
        /// A checkpoint of changed rows lacks the ids of evicted ones.
        EvictedNotSaved,
        /// After a restore, rows count as never updated.
        AgesNotRestored,
    }
    IN_RINGS {
        /// A step of a ring counts once one member has made it.
        CountsEarly,
        /// Values of a ring are accepted although a later ring has settled.
        AbandonedValues,
        /// A member that lacks the newest step does not get the values of one that has it.
        NoBroadcast,
        /// The data of the steps that a broken ring has not made is not leased again.
        SpanLost,
        /// The next steps of a ring do not wait until its values are copied for a checkpoint.
        CopyNotAwaited,
        /// A member that takes another's values does not take their number of updates.
        UpdatesNotShared,
        /// A step counts as made, although a member has left the ring during it.
        HalfAStep,
        /// A sum on the members' devices counts, although a member has left before it was done.
        SumOfSome,
        /// The numbers of a member that has left count as zeros.
        MissingPieces,
        /// Each member cuts gradients into buckets in an order of its own.
        OwnOrder,
        /// A bucket counts, although it was sent before its gradient was complete.
        LeftTooEarly,
        /// Each worker of a stage group counts the samples of the group.
        GroupCountsTwice,
        /// Samples are leased for spare workers, which compute none.
        SpareHasSamples,
        /// A step is closed before any member has a gradient.
        ClosesEmpty,
        /// A late member does not make the updates of the steps that it has missed.
        MissedNotMade,
        /// The commit of a ring's step lacks the rows of a worker.
        RowsForgotten,
        /// A worker takes part in the last sum of a step before servers have its rows.
        DenseFirst,
        /// A member begins with initial slots instead of those of the members that hold them.
        SlotsNotTaken,
        /// Optimizer slots of earlier values are taken for those of the newest values.
        OldSlots,
    }
    END_TO_END {
        /// A push that comes after a later one is acknowledged, though it was not applied.
        LateIsTaken,
        /// Gradients that are NaN or infinite are applied.
        TakesNonFinite,
        /// Servers may make the calls of workers.
        AnyRole,
        /// A step of sync mode counts without receipts.
        NoReceipts,
        /// A sync job that goes back does not wait for the workers that it has evicted.
        NobodyAwaited,
        /// A server that is told to stop may leave before its shard is saved.
        NoDrain,
        /// A run deletes the checkpoints of another.
        DeletesOthers,
        /// A metric that is NaN or infinite is written as null.
        NullNumbers,
        /// A call without a token is taken.
        NoToken,
        /// A full port ends no silent new connection to make room for another.
        NoRoom,
        /// A message may have any number of parts.
        AnyParts,
        /// A worker is not told which tasks its pulls wait for.
        SilentWaits,
        /// A report of steps does not renew the lease, though its answer says so.
        UnrenewedLease,
        /// A worker does not repeat the reports of steps that no reply has confirmed.
        ForgottenReports,
        /// Reports of several epochs share a stream, so a refusal is taken for that of a later epoch's report.
        SharedReportStream,
        /// A push names versions of weights that arrived after its gradients were computed.
        LaterWeights,
        /// Gradients of old weights are applied as if they were new.
        StaleAsNew,
    }
}

thread_local! {
    static OF_THREAD: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Plants a fault in this thread, in place of any other.
pub fn plant(fault: Option<Fault>) {
    OF_THREAD.set(fault);
}

/// Returns whether a fault is planted in this thread or process.
pub fn is_planted(fault: Fault) -> bool {
    OF_THREAD.get().or_else(of_process) == Some(fault)
}

fn of_process() -> Option<Fault> {
    static OF_PROCESS: OnceLock<Option<Fault>> = OnceLock::new();
    *OF_PROCESS.get_or_init(|| {
        let name = std::env::var(VARIABLE).ok()?;
        let mut all = Fault::ALL.iter().copied().flatten().copied();
        all.find(|fault| format!("{fault:?}") == name)
    })
}
