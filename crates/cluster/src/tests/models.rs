//! The model as workers register it, and the conditions that keep training from beginning.

use super::*;
use shared_proto::blocks::BLOCK_ELEMENTS;
use shared_proto::refusal::Refusal;

fn model(variables: &[(&str, usize)]) -> Vec<VariableSpec> {
    let spec = |(name, elements): &(&str, usize)| VariableSpec {
        name: (*name).to_owned(),
        shape: vec![*elements],
        ..VariableSpec::default()
    };
    variables.iter().map(spec).collect()
}

impl Scene {
    fn model(
        &mut self,
        task: Task,
        variables: &[(&str, usize)],
    ) -> Result<Initialization, Refusal> {
        let specs = model(variables);
        self.cluster
            .register_variables(self.now, task, specs, data(SAMPLES, 7))
    }
}

#[test]
fn data_without_samples_or_of_more_than_can_be_counted_is_refused() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    let worker = scene.join(Role::Worker, "w");
    for (training, evaluation) in [((1 << 48) + 1, 1), (1, u64::MAX), (0, 1), (1, 0)] {
        let specs = model(&[("w", 4)]);
        let data = data(training, evaluation);
        let refused = scene
            .cluster
            .register_variables(scene.now, worker, specs, data);
        assert_eq!(refused.unwrap_err().reason, Reason::Malformed);
        assert!(scene.cluster.durable.variables.is_none());
    }
}

#[test]
fn what_training_waits_for_is_told_at_each_stage() {
    for ps in [Some(2), None] {
        let mut scene = Scene::new(Mode::Async, ps, 2);
        scene.cluster = scene
            .cluster
            .with_checkpoints(super::checkpoints::place(), 0);
        let mut told = Vec::new();
        let mut tells = |scene: &Scene| told.push(scene.cluster.missing());
        tells(&scene);
        let worker = scene.join(Role::Worker, "w");
        let first = scene.join(Role::Ps, "a");
        scene.variables(worker);
        tells(&scene);
        let second = scene.join(Role::Ps, "b");
        let servers = [first, second];
        scene.pass(3, &[worker, first, second]);
        assert_eq!(scene.variables(worker), Initialization::Yours);
        // A repeated call gets the same answer.
        assert_eq!(scene.variables(worker), Initialization::Yours);
        tells(&scene);
        scene.cluster.finish_initialization(worker).unwrap();
        scene.work(worker);
        tells(&scene);
        let other = scene.join(Role::Worker, "x");
        scene.variables(other);
        scene.work(other);
        tells(&scene);
        scene.write(&servers, "");
        tells(&scene);
        assert_eq!(scene.cluster.durable.outcome.phase, JobPhase::Training);
        let leave = wire::LeaveRequest::default();
        scene.cluster.leave(scene.now, worker, &leave);
        tells(&scene);
        scene.cluster.leave(scene.now, other, &leave);
        tells(&scene);
        let of_servers = match ps {
            Some(_) => "1 of 2 parameter servers have registered",
            None => {
                "1 parameter servers have registered; training begins once no other has joined for 3 s"
            }
        };
        let of_nobody = match ps {
            Some(_) => "0 of 2 workers have registered; 0 of 2 parameter servers have registered",
            None => "0 of 2 workers have registered; no parameter server has registered; start one",
        };
        let expected = [
            of_nobody,
            of_servers,
            "worker-0 is sending the initial values",
            "1 of 2 workers are ready",
            "the first checkpoint is being written",
            "",
            "",
            "no worker is there; start one",
        ];
        assert_eq!(told, expected);
    }
}

#[test]
fn a_model_is_sorted_by_name_and_has_each_variable_once() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    for wrong in [&[("b", 1), ("a", 1)][..], &[("a", 1), ("a", 1)], &[]] {
        let refused = scene.model(worker, wrong).unwrap_err();
        assert_eq!(refused.reason, Reason::Malformed, "{wrong:?}");
    }
    let right = scene.model(worker, &[("a", 1), ("b", 2)]);
    assert_eq!(right, Ok(Initialization::Yours));
}

#[test]
fn a_worker_with_another_model_is_told_which_variable_differs() {
    let mut scene = Scene::new(Mode::Async, Some(1), 2);
    scene.join(Role::Ps, "ps");
    let first = scene.join(Role::Worker, "w");
    let other = scene.join(Role::Worker, "x");
    scene.model(first, &[("a", 1), ("b", 2)]).unwrap();
    for (model, part) in [
        (
            &[("a", 1), ("b", 3)][..],
            "\"b\" is shape [2] in the job, but shape [3]",
        ),
        (&[("a", 1)], "\"b\" is shape [2] in the job, but nothing"),
        (
            &[("a", 1), ("b", 2), ("c", 4)],
            "\"c\" is nothing in the job, but shape [4]",
        ),
    ] {
        let refused = scene.model(other, model).unwrap_err();
        assert_eq!(refused.reason, Reason::VariablesDiffer);
        assert!(refused.message.contains(part), "{refused}");
    }
    assert!(scene.model(other, &[("a", 1), ("b", 2)]).is_ok());
}

#[test]
fn a_registration_that_says_nothing_new_changes_nothing() {
    let mut scene = Scene::new(Mode::Async, Some(1), 2);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    let mut registers = |digest: &[u8]| {
        let data = WorkerData {
            digest: digest.to_vec(),
            ..data(SAMPLES, 7)
        };
        let cluster = &mut scene.cluster;
        let registered = cluster.register_variables(scene.now, worker, model(&[("a", 1)]), data);
        registered.unwrap();
        cluster.changes()
    };
    let without = registers(&[]);
    assert_eq!(registers(&[]), without);
    let with = registers(&[1; 32]);
    assert_ne!(with, without);
    assert_eq!(registers(&[1; 32]), with);
    assert_eq!(registers(&[]), with);
}

#[test]
fn the_blocks_of_each_shard_are_counted() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    assert_eq!(scene.cluster.durable.updated_blocks_of(0), 0);
    let variables = [("a", 1), ("b", BLOCK_ELEMENTS * 3 / 2)];
    scene.model(worker, &variables).unwrap();
    assert_eq!(
        [0, 1].map(|shard| scene.cluster.durable.updated_blocks_of(shard)),
        [3, 0]
    );
}

#[test]
fn a_model_whose_shard_map_no_message_holds_is_refused_and_leaves_room_for_another() {
    let mut scene = Scene::new(Mode::Async, Some(1), 1);
    scene.join(Role::Ps, "ps");
    let worker = scene.join(Role::Worker, "w");
    let scalars = (0..300_000).map(|i| VariableSpec {
        name: format!("v{i:06}"),
        shape: Vec::new(),
        ..VariableSpec::default()
    });
    let huge = VariableSpec {
        name: "w".to_owned(),
        shape: vec![1 << 40],
        ..VariableSpec::default()
    };
    for specs in [scalars.collect(), vec![huge]] {
        let registered =
            scene
                .cluster
                .register_variables(scene.now, worker, specs, data(SAMPLES, 7));
        assert_eq!(registered.unwrap_err().reason, Reason::Oversized);
    }
    assert_eq!(scene.variables(worker), Initialization::Yours);
}
