//! Registrations, the cut of the shard map, and the lease of the initial values.

use super::*;
use crate::members::{Member, Standing};

#[test]
fn the_map_is_cut_when_the_jobs_servers_are_there_and_later_ones_are_spares() {
    let mut scene = Scene::new(Mode::Async, Some(2), 1);
    let worker = scene.join(Role::Worker, "w");
    scene.join(Role::Ps, "a");
    assert!(
        matches!(scene.variables(worker), Initialization::Pending(why) if why.contains("1 of 2"))
    );
    scene.join(Role::Ps, "b");
    assert_eq!(scene.variables(worker), Initialization::Yours);
    scene.join(Role::Ps, "c");
    assert_eq!(scene.addresses(), ["a", "b"]);
}

#[test]
fn without_a_number_of_servers_the_map_waits_until_none_has_joined_for_three_seconds() {
    let mut scene = Scene::new(Mode::Async, None, 1);
    let worker = scene.join(Role::Worker, "w");
    assert!(matches!(
        scene.variables(worker),
        Initialization::Pending(_)
    ));
    scene.join(Role::Ps, "a");
    let servers = [worker, scene.server()];
    scene.pass(2, &servers);
    scene.join(Role::Ps, "b");
    scene.pass(2, &servers);
    assert!(matches!(
        scene.variables(worker),
        Initialization::Pending(_)
    ));
    scene.pass(1, &servers);
    assert_eq!(scene.variables(worker), Initialization::Yours);
    assert_eq!(scene.cluster.shard_map().unwrap().shards.len(), 2);
}

#[test]
fn a_restarted_process_supersedes_its_earlier_life() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let (held, _) = scene.split(tasks[0]);
    let again = scene.join(Role::Worker, "w0");
    assert_eq!((again.id, again.generation.0), (tasks[0].id, 2));
    let (origin, _) = scene.step(tasks[0], Clock(1), held.id, held.end);
    assert_eq!(
        scene.cluster.admit(&origin).unwrap_err().reason,
        Reason::Superseded
    );
    // Its data is handed out again.
    let (next, _) = scene.split(again);
    assert_eq!((next.start, next.end), (held.start, held.end));
}

#[test]
fn a_member_of_another_run_is_told_to_register_again() {
    let (mut scene, tasks) = Scene::training(Mode::Async, 2);
    let mut origin = scene.origin(tasks[0], Clock(0));
    origin.run = RunNumber(5);
    // Like the state of an earlier release, the scene has no run number, so none is compared.
    assert_eq!(scene.cluster.admit(&origin), Ok(()));
    scene.cluster = scene.cluster.with_run_number(RunNumber(7));
    let refused = scene.cluster.admit(&origin).unwrap_err();
    assert_eq!(refused.reason, Reason::Fenced);
    assert!(refused.message.contains("another run"), "{refused}");
    for run in [0, 7] {
        origin.run = RunNumber(run);
        assert_eq!(scene.cluster.admit(&origin), Ok(()));
    }
    let saved = scene.cluster.snapshot(scene.now);
    assert_eq!(saved.run.id(), Some(format!("{:016x}", 7)));
}

#[test]
fn initialising_is_leased_to_one_life_and_passes_on_when_that_ends() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let (first, second) = (scene.join(Role::Worker, "x"), scene.join(Role::Worker, "y"));
    assert_eq!(scene.variables(first), Initialization::Yours);
    assert!(matches!(
        scene.variables(second),
        Initialization::Pending(_)
    ));
    let server = scene.server();
    scene.pass(11, &[second, server]);
    assert_eq!(scene.variables(second), Initialization::Yours);
    assert!(scene.cluster.finish_initialization(first).is_err());
    scene.cluster.finish_initialization(second).unwrap();
    assert!(scene.cluster.refresh_view().initialized);
}

/// The text is of a release in which a member had two fields in place of its standing.
#[test]
fn a_member_is_stored_as_an_array_of_its_fields() {
    for (fields, standing) in [
        ("true,\"\"", Standing::Alive),
        (
            "false,\"it has left\"",
            Standing::Gone("it has left".to_owned()),
        ),
    ] {
        let stored = format!(
            r#"[{{"id":{{"role":"Worker","index":3}},"generation":2}},"w","w:1","w:2",[7,1,[5]],900,{fields},[4,true,false,6,0,80,10,9,[0.5,0.0,0.0,0.0]]]"#
        );
        let member: Member = serde_json::from_str(&stored).unwrap();
        let (identity, addresses) = (&member.identity, (&member.address, &member.metrics_address));
        assert_eq!((identity.as_str(), addresses.0.as_str()), ("w", "w:1"));
        assert_eq!((addresses.1.as_str(), member.capacity), ("w:2", Some(900)));
        assert_eq!(member.standing, standing);
        assert_eq!(member.progress.samples, 80);
        assert_eq!(serde_json::to_string(&member).unwrap(), stored);
    }
}
