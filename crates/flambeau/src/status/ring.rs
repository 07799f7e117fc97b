//! The ring of a job: its members, and those that the others wait for.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use shared_proto::wire;

use super::{harmless, task_of};

/// Writes a line about the ring, the table of its members, and a line about each member that others wait for.
pub(super) fn write(text: &mut String, ring: &wire::RingStatus, tasks: &[wire::TaskStatus]) {
    let _ = writeln!(text, "{}", line(ring));
    if ring.members.is_empty() {
        return;
    }
    let _ = writeln!(text, "{}", table(ring).trim_fmt());
    for member in &ring.members {
        if let (Some(task), Some(seconds)) = (task_of(member.task.as_ref()), member.waited_for) {
            let mut tasks = tasks.iter();
            let shown = |of: &wire::TaskStatus| of.task.as_ref().and_then(|of| of.task);
            let of_member = tasks.find(|of| shown(of) == member.task);
            let missing = match ring.stage() {
                wire::RingStage::Settled => match of_member {
                    Some(of) if of.activity == "evaluating" => "it evaluates",
                    _ => "it has not done its part yet",
                },
                wire::RingStage::Formed => "it has not taken the ring's values yet",
                _ => "it has not joined the ring yet",
            };
            let _ = writeln!(
                text,
                "the others have waited for {task} for {seconds:.1} s: {missing}"
            );
        }
    }
}

fn line(ring: &wire::RingStatus) -> String {
    let age = ring.seconds.map(|seconds| format!("{seconds:.0} s"));
    let members = ring.members.len();
    let mut line = match ring.stage() {
        wire::RingStage::Settled | wire::RingStage::Formed => {
            let ago = age.map_or_else(String::new, |age| format!(", formed {age} ago"));
            format!("ring {} of {members} workers{ago}", ring.number)
        }
        _ => {
            let joined = ring.members.iter().filter(|member| member.joined).count();
            let wanted = members.max(ring.wanted as usize);
            let since = age.map_or_else(String::new, |age| format!(" for {age}"));
            format!(
                "ring {} is being formed{since}: {joined} of {wanted} workers have joined",
                ring.number.max(1)
            )
        }
    };
    let broken = ring.broken.iter();
    let broken: Vec<String> = broken
        .map(|broken| format!("{} {}", broken.number, harmless(&broken.cause)))
        .collect();
    if !broken.is_empty() {
        let _ = write!(line, "; broken before: {}", broken.join(", "));
    }
    if ring.evicted > 0 {
        let _ = write!(line, "; {} workers evicted as unreachable", ring.evicted);
    }
    line
}

fn table(ring: &wire::RingStatus) -> Table {
    let mut table = Table::new();
    let mut header = vec!["rank", "member", "joined", "steps", "waited for"];
    let mut members = ring.members.iter();
    let has_groups = members.any(|member| member.spare || member.place.is_some());
    if has_groups {
        header.insert(2, "place");
    }
    table.load_preset(presets::NOTHING).set_header(header);
    for (rank, member) in ring.members.iter().enumerate() {
        let waited = member.waited_for.map(|seconds| format!("{seconds:.1} s"));
        let mut row = vec![
            rank.to_string(),
            task_of(member.task.as_ref()).map_or(String::new(), |task| task.to_string()),
            if member.joined { "yes" } else { "no" }.to_owned(),
            member.made.to_string(),
            waited.unwrap_or_default(),
        ];
        if has_groups {
            let place = member.place.map(|place| place.to_string());
            row.insert(2, place.unwrap_or_else(|| "spare".to_owned()));
        }
        table.add_row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(index: u32, joined: bool, waited_for: Option<f64>) -> wire::RingMemberStatus {
        wire::RingMemberStatus {
            task: Some(wire::Task {
                role: wire::Role::Worker.into(),
                index,
                generation: 1,
            }),
            joined,
            made: 70,
            waited_for,
            ..wire::RingMemberStatus::default()
        }
    }

    fn ring(stage: wire::RingStage, members: Vec<wire::RingMemberStatus>) -> wire::RingStatus {
        wire::RingStatus {
            number: 4,
            stage: stage.into(),
            seconds: Some(12.3),
            members,
            wanted: 3,
            broken: vec![wire::BrokenRings {
                cause: "link".to_owned(),
                number: 2,
            }],
            evicted: 1,
        }
    }

    #[test]
    fn the_slow_member_is_named_with_the_time() {
        let members = vec![member(0, true, None), member(2, true, Some(5.26))];
        let status = wire::Status {
            strategy: "multi-worker-mirrored".to_owned(),
            mode: "sync".to_owned(),
            ring: Some(ring(wire::RingStage::Settled, members)),
            ..wire::Status::default()
        };
        let text = crate::status::table(&status);
        assert!(text.contains("multi-worker-mirrored"), "{text}");
        let head = "ring 4 of 2 workers, formed 12 s ago; broken before: 2 link; 1 workers evicted as unreachable";
        assert!(text.contains(head), "{text}");
        let row = text.lines().find(|line| line.contains("worker-2")).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells, ["1", "worker-2", "yes", "70", "5.3", "s"]);
        assert!(
            text.contains("the others have waited for worker-2 for 5.3 s"),
            "{text}"
        );
        assert!(!text.contains("waited for worker-0"), "{text}");
        let json = &daemon::status::json(&status)["ring"];
        assert_eq!(json["members"][1]["waited_for_seconds"], 5.26);
        assert_eq!(json["members"][1]["rank"], 1);
        assert!(json["members"][0]["waited_for_seconds"].is_null());
        assert_eq!(json["stage"], "settled");
        assert_eq!(json["broken"]["link"], 2);
    }

    #[test]
    fn a_ring_that_is_being_formed_says_who_is_missing() {
        let members = vec![member(0, true, None), member(1, false, Some(3.0))];
        let mut text = String::new();
        write(&mut text, &ring(wire::RingStage::Forming, members), &[]);
        assert!(
            text.starts_with("ring 4 is being formed for 12 s: 1 of 3 workers have joined"),
            "{text}"
        );
        assert!(
            text.contains(
                "the others have waited for worker-1 for 3.0 s: it has not joined the ring yet"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_member_that_evaluates_is_named() {
        let members = vec![member(0, true, None), member(1, true, Some(3.0))];
        let evaluator = wire::TaskStatus {
            task: Some(wire::ClusterTask {
                task: members[1].task,
                ..wire::ClusterTask::default()
            }),
            activity: "evaluating".to_owned(),
            ..wire::TaskStatus::default()
        };
        let mut text = String::new();
        let ring = ring(wire::RingStage::Settled, members);
        write(&mut text, &ring, &[evaluator]);
        let said = "the others have waited for worker-1 for 3.0 s: it evaluates";
        assert!(text.contains(said), "{text}");
    }

    #[test]
    fn the_place_in_a_stage_group_is_shown() {
        let mut members: Vec<_> = (0..3).map(|index| member(index, true, None)).collect();
        (members[0].place, members[1].place) = (Some(0), Some(1));
        members[2].spare = true;
        let mut text = String::new();
        write(&mut text, &ring(wire::RingStage::Settled, members), &[]);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[1],
            [
                "rank", "member", "place", "joined", "steps", "waited", "for"
            ]
        );
        assert_eq!(rows[3], ["1", "worker-1", "1", "yes", "70"]);
        assert_eq!(rows[4], ["2", "worker-2", "spare", "yes", "70"]);
    }
}
