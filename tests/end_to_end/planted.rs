//! Faults that are planted in the processes (`shared-proto/src/planted`).

use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use shared_proto::planted::{Fault, VARIABLE};
use tests::runs_slow_tests;

/// Each fault makes the test fail that is listed with it.
#[test]
fn planted_faults_are_found() {
    const FOUND_BY: &[(Fault, &str)] = &[
        (
            Fault::LateIsTaken,
            "protocol::a_push_that_was_not_applied_is_never_acknowledged",
        ),
        (
            Fault::TakesNonFinite,
            "protocol::bad_messages::bad_messages_are_refused_by_name_and_change_nothing",
        ),
        (
            Fault::AnyRole,
            "calls::a_call_of_another_role_is_refused_and_changes_nothing",
        ),
        (
            Fault::NoReceipts,
            "steps::a_worker_that_finishes_without_a_push_is_evicted_alone",
        ),
        (
            Fault::NobodyAwaited,
            "faults::in_sync_mode_a_run_with_dead_servers_equals_one_without",
        ),
        (
            Fault::NoDrain,
            "replaced::a_server_that_is_stopped_and_started_again_loses_nothing",
        ),
        (
            Fault::DeletesOthers,
            "stores::two_runs_at_one_location_do_each_other_no_harm",
        ),
        (
            Fault::NullNumbers,
            "stores::a_metric_that_is_no_number_is_kept_and_gone_on_with",
        ),
        (
            Fault::NoToken,
            "security::with_certificates_and_a_token_nobody_else_is_let_in",
        ),
        (
            Fault::NoRoom,
            "flood::a_job_trains_on_while_its_ports_are_flooded",
        ),
        (
            Fault::AnyParts,
            "hostile::pulls_of_many_empty_parts_take_no_memory",
        ),
        (
            Fault::SilentWaits,
            "modes::no_worker_leads_by_more_than_the_bound_and_those_who_wait_say_for_whom",
        ),
        (
            Fault::UnrenewedLease,
            "modes::reports_of_steps_renew_the_lease_in_place_of_heartbeats",
        ),
        (
            Fault::ForgottenReports,
            "modes::each_step_is_counted_once_though_the_connections_of_reports_break",
        ),
        (
            Fault::SharedReportStream,
            "steps::a_refused_report_is_repeated_in_the_epoch_of_the_next_one",
        ),
        (
            Fault::LaterWeights,
            "modes::the_staleness_of_a_worker_that_computes_ahead_is_measured",
        ),
        (
            Fault::StaleAsNew,
            "modes::eight_workers_with_momentum_learn_in_bounded_mode",
        ),
    ];
    let found_by = FOUND_BY.iter().map(|(fault, _)| fault);
    assert!(found_by.eq(Fault::END_TO_END), "each fault has a test");
    if !runs_slow_tests("faults that are planted in processes") {
        return;
    }
    // Returns the result of a test, with a fault or with none.
    let result = |test: &str, fault: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(VARIABLE, fault)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().find(|line| line.starts_with("test result"));
        line.unwrap_or_default().to_owned()
    };
    // Most of these tests wait for leases to end, so two run at a time for each core.
    let at_a_time = 2 * std::thread::available_parallelism().unwrap().get();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((fault, test)) = FOUND_BY.get(next.fetch_add(1, Relaxed)) {
            // A test that also fails without the fault does not find it.
            let without = result(test, "");
            assert!(without.contains("1 passed; 0 failed"), "{test}: {without}");
            if !result(test, &format!("{fault:?}")).contains("0 passed; 1 failed") {
                missed.lock().unwrap().push(fault);
            }
            println!("{fault:?}: {test}");
        }
    };
    std::thread::scope(|scope| (0..at_a_time).for_each(|_| drop(scope.spawn(work))));
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
