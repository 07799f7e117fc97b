//! Models that need more memory than the servers state.

use super::*;
use shared_proto::job::{Adam, Optimizer, Sgd};

/// Elements of the model: 4 KiB of weights.
const ELEMENTS: usize = 1024;

impl Scene {
    fn server_with(&mut self, identity: &str, capacity_bytes: u64) -> Task {
        let request = wire::RegisterRequest {
            identity: identity.to_owned(),
            address: identity.to_owned(),
            capacity_bytes,
            ..wire::RegisterRequest::default()
        };
        self.cluster.register(self.now, Role::Ps, request).unwrap()
    }

    fn model_of(&mut self, worker: Task, elements: usize) -> Result<Initialization, Reason> {
        let specs = vec![VariableSpec {
            name: "w".to_owned(),
            shape: vec![elements],
            ..VariableSpec::default()
        }];
        self.cluster
            .register_variables(self.now, worker, specs, data(SAMPLES, 7))
            .map_err(|refusal| {
                let message = &refusal.message;
                assert!(
                    message.contains("ps-0") && message.contains("MiB"),
                    "{message}"
                );
                refusal.reason
            })
    }
}

/// Creates a scene with one server that has memory for `capacity` bytes, and two workers.
fn begin(mode: Mode, optimizer: Optimizer, capacity: u64) -> (Scene, Task) {
    let mut scene = Scene::new(mode, Some(1), 2);
    let mut job = scene.cluster.job().clone();
    job.optimizer = optimizer;
    scene.cluster = Cluster::new(job);
    scene.server_with("ps", capacity);
    let worker = scene.join(Role::Worker, "w");
    (scene, worker)
}

#[test]
fn a_model_that_needs_more_than_a_server_has_is_refused_and_leaves_room_for_a_smaller_one() {
    let weights = 4 * ELEMENTS as u64;
    let (sgd, adam) = (
        || Optimizer::Sgd(Sgd::default()),
        || Optimizer::Adam(Adam::default()),
    );
    for (mode, optimizer, needed) in [
        // The average of the last weights is a copy of them, and look-ahead weights are another.
        (Mode::Async, sgd(), 2 * weights),
        (Mode::Async, adam(), 5 * weights),
        // A gradient of each of two workers is staged.
        (Mode::Sync, sgd(), 3 * weights),
        (Mode::Sync, adam(), 5 * weights),
    ] {
        let (mut scene, worker) = begin(mode, optimizer.clone(), needed);
        assert_eq!(scene.model_of(worker, ELEMENTS), Ok(Initialization::Yours));
        let (mut scene, worker) = begin(mode, optimizer, needed - 1);
        assert_eq!(scene.model_of(worker, ELEMENTS), Err(Reason::Oversized));
        // It is forgotten, so another model is not compared with it.
        assert_eq!(
            scene.model_of(worker, ELEMENTS / 2),
            Ok(Initialization::Yours)
        );
    }
}

#[test]
fn a_server_that_does_not_say_what_it_has_is_given_any_model() {
    let (mut scene, worker) = begin(Mode::Async, Optimizer::default(), 0);
    assert_eq!(scene.model_of(worker, 1 << 30), Ok(Initialization::Yours));
}

#[test]
fn a_shard_goes_to_a_spare_that_has_memory_for_it() {
    let (mut scene, _) = begin(Mode::Async, Optimizer::default(), 0);
    let job = scene.cluster.job().clone();
    scene.cluster = Cluster::new(job).with_checkpoints(super::checkpoints::place(), 0);
    let server = scene.server_with("ps", 1 << 20);
    let worker = scene.join(Role::Worker, "w");
    assert_eq!(scene.model_of(worker, ELEMENTS), Ok(Initialization::Yours));
    scene.cluster.finish_initialization(worker).unwrap();
    let small = scene.server_with("small", 100);
    scene.pass(11, &[worker, small]);
    assert_eq!(
        scene.cluster.durable.servers(),
        [server],
        "the small one has no memory for the shard"
    );
    let large = scene.server_with("large", 1 << 20);
    assert_eq!(scene.cluster.durable.servers(), [large]);
}

#[test]
fn the_last_block_of_a_variable_needs_only_what_is_in_it() {
    let elements = shared_proto::blocks::BLOCK_ELEMENTS * 5 / 2;
    // The weights, and the average of the last ones.
    let needed = 2 * 4 * elements as u64;
    for (capacity, fits) in [(needed - 1, false), (needed, true)] {
        let (mut scene, worker) = begin(Mode::Async, Optimizer::Sgd(Sgd::default()), capacity);
        assert_eq!(scene.model_of(worker, elements).is_ok(), fits);
    }
}
