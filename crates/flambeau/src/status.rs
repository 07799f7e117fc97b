//! `flambeau status`: the state of a cluster.

pub(crate) mod local;
mod ring;

use daemon::{out, outln};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use comfy_table::{Table, presets};
use daemon::membership::{Coordinator, MembershipError};
use daemon::settings::SecuritySettings;
use daemon::status::{failure, json, phase, task_name, task_of, waits};
use network::security::Security;
use shared_proto::ids::{Generation, names};
use shared_proto::wire;

use crate::command::block_on;
use crate::error::CommandError;

/// The longest wait for the coordinator's answer.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Args)]
pub(crate) struct Arguments {
    /// The coordinator, as host:port. Default: the cluster of this user on this machine; if there are several, a list of
    /// them is shown.
    #[arg(long, env = "FLAMBEAU_COORDINATOR")]
    coordinator: Option<String>,
    /// One JSON object instead of tables.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    security: SecuritySettings,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let security = arguments.security.load()?;
    block_on(async {
        let Some(address) = &arguments.coordinator else {
            return show_local(arguments.json, security).await;
        };
        let status = fetch(&Coordinator::at(address, PATIENCE, security)?).await?;
        show(&status, arguments.json, "");
        Ok(())
    })
}

fn show(status: &wire::Status, as_json: bool, place: &str) {
    if as_json {
        outln!("{}", json(status));
    } else {
        out!("{place}{}", table(status));
    }
}

/// Shows the cluster of this machine, or all if there are several.
async fn show_local(as_json: bool, security: Security) -> Result<(), CommandError> {
    let clusters = local::find()?;
    if clusters.len() > 1 {
        let found = local::ask_all(clusters, &security).await;
        match as_json {
            true => outln!("{}", local::json(&found)),
            false => out!("{}", local::table(&found)),
        }
        return Ok(());
    }
    let Some(cluster) = clusters.first() else {
        let status = fetch(&Coordinator::at(local::USUAL, PATIENCE, security)?).await;
        let status = status.map_err(|error| match error {
            CommandError::Membership(MembershipError::Unreachable { .. }) => local::none_found(),
            other => other,
        })?;
        show(&status, as_json, "");
        return Ok(());
    };
    let address = cluster.reachable_at().to_string();
    let status = fetch(&Coordinator::at(&address, PATIENCE, security)?).await?;
    show(&status, as_json, &local::place(cluster));
    Ok(())
}

/// Fetches the status from the coordinator.
pub(crate) async fn fetch(coordinator: &Coordinator) -> Result<wire::Status, CommandError> {
    Ok(coordinator.status().await?)
}

/// Returns whether a character acts on the terminal: control characters, and those that change the direction of text.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes the characters in text from other processes that would act on the terminal.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().map(|c| match acts(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    });
    Cow::Owned(escaped.collect())
}

/// Returns the status as tables.
pub(crate) fn table(status: &wire::Status) -> String {
    let mut text = String::new();
    if status.phase() == wire::JobPhase::Idle {
        let members = match status.tasks.as_slice() {
            [] => "no server or worker has called yet".to_owned(),
            _ => tasks_table(status).trim_fmt(),
        };
        return format!(
            "no job: this cluster waits for one (`flambeau submit JOB.toml`)\n{members}\n"
        );
    }
    let bound = match (status.mode.as_str(), status.staleness, status.pipeline) {
        ("bounded", Some(bound), 0) => format!(" (staleness at most {bound})"),
        ("bounded", Some(bound), ahead) => {
            format!(" (staleness at most {bound}, pipeline {ahead})")
        }
        (_, _, 0) => String::new(),
        (_, _, ahead) => format!(" (pipeline {ahead})"),
    };
    // Workers that form a ring know no other mode than sync.
    let way = match &status.ring {
        Some(_) => &status.strategy,
        None => &status.mode,
    };
    let _ = writeln!(
        text,
        "job {:?}: {}, {}{bound}, epoch {} of {}, {} of {} samples, {} steps, min clock {}",
        status.job,
        phase(status),
        harmless(way),
        (status.data_epoch + 1).min(status.data_epochs),
        status.data_epochs,
        status.samples,
        status.total_samples,
        status.steps,
        status.min_clock
    );
    if let Some(newest) = &status.checkpoint {
        let _ = writeln!(
            text,
            "checkpoint {} of step {}, {:.0} s ago; {}",
            newest.number,
            newest.clock,
            newest.age,
            lost(status)
        );
    }
    if let Some(factor) = status.learning_rate_factor.filter(|factor| *factor < 1.0) {
        let _ = writeln!(
            text,
            "the learning rate has fallen to {factor:.3e} of the job's"
        );
    }
    for reason in [
        &status.waiting_for,
        &status.checkpoint_error,
        &status.loss_warning,
        &status.error,
    ] {
        if !reason.is_empty() {
            let _ = writeln!(text, "{}", harmless(reason));
        }
    }
    let _ = writeln!(text, "{}", tasks_table(status).trim_fmt());
    if let Some(ring) = &status.ring {
        ring::write(&mut text, ring, &status.tasks);
    }
    if !status.shards.is_empty() {
        let _ = writeln!(text, "{}", shards_table(status).trim_fmt());
    }
    if !status.tables.is_empty() {
        let _ = writeln!(text, "{}", rows_table(status).trim_fmt());
    }
    write_remarks(&mut text, status);
    text
}

/// Describes the lost updates.
fn lost(status: &wire::Status) -> String {
    let steps = status.shards.iter().zip(0u32..);
    let steps = steps.map(|(status, shard)| (shard, status.lost_steps));
    lost_updates(status.lost_updates, steps)
}

/// Describes the number of lost updates, and the number of lost steps of each shard.
pub(crate) fn lost_updates(updates: u64, steps: impl Iterator<Item = (u32, u64)>) -> String {
    let steps = steps.filter(|(_, steps)| *steps > 0);
    let steps: Vec<String> = steps
        .map(|(shard, steps)| format!("{steps} steps of shard {shard}"))
        .collect();
    match (updates, steps.is_empty()) {
        (0, _) => "no update lost".to_owned(),
        (_, true) => format!("{updates} updates of blocks lost"),
        (_, false) => format!("{updates} updates of blocks lost ({})", steps.join(", ")),
    }
}

/// Writes a line about each task and shard that needs attention.
fn write_remarks(text: &mut String, status: &wire::Status) {
    for (shard, status) in status.shards.iter().enumerate() {
        if let Some(report) = status.report.as_ref().filter(|r| !r.non_finite.is_empty()) {
            let _ = writeln!(
                text,
                "shard {shard} has values of {} that are NaN or infinite",
                harmless(&report.non_finite)
            );
        }
    }
    for task in &status.tasks {
        let waits = waits(task);
        let waiter = task_of(task.task.as_ref().and_then(|t| t.task.as_ref()));
        if let (Some(waiter), false) = (waiter, waits.is_empty()) {
            let _ = writeln!(text, "{waiter} waits for {}", names(&waits));
        }
        if let (Some(worker), Some(failure)) = (waiter, failure(task)) {
            let _ = writeln!(
                text,
                "{worker} cannot work ({failure}): {}",
                harmless(&task.trouble)
            );
        }
    }
}

fn tasks_table(status: &wire::Status) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "task",
        "generation",
        "address",
        "metrics",
        "heartbeat",
        "does",
        "clock",
        "lead",
        "loss",
        "samples/s",
    ]);
    for task in &status.tasks {
        let place = task.task.clone().unwrap_or_default();
        let id = task_of(place.task.as_ref());
        let worker = task.activity != "serving";
        let of_worker = |text: String| if worker { text } else { String::new() };
        // A worker that has not worked since the coordinator started has no figures.
        let at_work = task.loss.is_finite() || task.clock > 0;
        let of_work = |text: String| {
            if at_work {
                of_worker(text)
            } else {
                String::new()
            }
        };
        let finite = |text: String| {
            if task.loss.is_finite() {
                text
            } else {
                String::new()
            }
        };
        table.add_row([
            task_name(place.task.as_ref()),
            id.filter(|t| t.generation > Generation(0))
                .map_or(String::new(), |t| t.generation.to_string()),
            harmless(&place.address).into_owned(),
            harmless(&place.metrics_address).into_owned(),
            format!("{:.1} s ago", task.heartbeat_age),
            harmless(&task.activity).into_owned(),
            of_work(task.clock.to_string()),
            of_work(task.lead.to_string()),
            of_work(finite(format!("{:.4}", task.loss))),
            of_work(finite(format!("{:.0}", task.samples_per_second))),
        ]);
    }
    table
}

fn shards_table(status: &wire::Status) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "shard",
        "server",
        "blocks",
        "bytes",
        "updates",
        "largest lead",
        "refused",
    ]);
    for (shard, status) in status.shards.iter().enumerate() {
        let report = status.report.clone().unwrap_or_default();
        table.add_row([
            shard.to_string(),
            task_of(status.server.as_ref()).map_or(String::new(), |t| t.to_string()),
            report.blocks.to_string(),
            report.bytes.to_string(),
            report.updates.to_string(),
            report.max_clock_lead.to_string(),
            report.refused.to_string(),
        ]);
    }
    table
}

fn rows_table(status: &wire::Status) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "table", "rows", "on disk", "memory", "a row", "created", "refused", "evicted",
    ]);
    for status in &status.tables {
        let report = status.report.unwrap_or_default();
        let of_row = report.bytes.checked_div(report.rows);
        table.add_row([
            harmless(&status.name).into_owned(),
            report.rows.to_string(),
            report.on_disk.to_string(),
            report.bytes.to_string(),
            of_row.map_or(String::new(), |bytes| format!("{bytes} bytes")),
            report.created.to_string(),
            report.refused.to_string(),
            report.evicted.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(loss: f64, clock: u64, address: &str) -> wire::Status {
        let task = wire::ClusterTask {
            task: Some(wire::Task {
                role: wire::Role::Worker.into(),
                index: 0,
                generation: 1,
            }),
            metrics_address: address.to_owned(),
            ..wire::ClusterTask::default()
        };
        wire::Status {
            tasks: vec![wire::TaskStatus {
                task: Some(task),
                activity: "idle".to_owned(),
                loss,
                clock,
                ..wire::TaskStatus::default()
            }],
            ..wire::Status::default()
        }
    }

    #[test]
    fn a_worker_that_has_not_worked_shows_no_figures() {
        let text = table(&worker(f64::NAN, 0, "x"));
        assert!(!text.contains("NaN"), "{text}");
        let row = text.lines().find(|line| line.contains("worker-0")).unwrap();
        assert!(row.trim_end().ends_with("idle"), "{row:?}");
        assert!(table(&worker(0.5, 7, "x")).contains("0.5000"));
    }

    #[test]
    fn a_learning_rate_that_has_fallen_is_shown() {
        let mut status = worker(0.5, 7, "x");
        assert!(!table(&status).contains("learning rate"));
        status.learning_rate_factor = Some(0.01);
        assert!(table(&status).contains("fallen to 1.000e-2 of"));
        assert_eq!(json(&status)["learning_rate_factor"], 0.01);
    }

    #[test]
    fn a_table_has_a_line_with_its_rows() {
        let status = wire::Status {
            tables: vec![wire::TableStatus {
                name: "item".to_owned(),
                report: Some(wire::TableReport {
                    rows: 60,
                    on_disk: 20,
                    bytes: 3600,
                    created: 50,
                    refused: 7,
                    evicted: 10,
                }),
            }],
            ..wire::Status::default()
        };
        let text = table(&status);
        let line = text.lines().find(|line| line.contains("item")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        let expected = ["item", "60", "20", "3600", "60", "bytes", "50", "7", "10"];
        assert_eq!(cells, expected);
        assert_eq!(json(&status)["tables"][0]["evicted"], 10);
    }

    #[test]
    fn what_other_processes_say_cannot_act_on_the_terminal() {
        let mut status = worker(0.5, 7, "host\u{1b}[2J:1\u{7}");
        status.error = "bad\rgood".to_owned();
        let text = table(&status);
        assert!(!text.contains(['\u{1b}', '\u{7}', '\r']), "{text:?}");
        assert!(text.contains("host\\u{1b}[2J:1\\u{7}"), "{text}");
    }
}
