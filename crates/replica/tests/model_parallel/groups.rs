//! Stages on several workers, which exchange messages as the workers of a stage group do.

use flambeau_replica::{Carrier, Ends, Neighbours, Round, Rounds, StageSteps};
use futures_util::future::join_all;
use tokio::sync::mpsc::{Receiver, Sender};

use super::*;

/// A model in stages on several workers.
struct Group(Vec<DeviceReplicas>);

/// Returns the replicas of a stage group, each on so many devices.
async fn group(model: &str, strategy: &str, workers: usize, devices: usize) -> Group {
    let mut replicas = Vec::new();
    for place in 0..workers {
        let strategy = format!("{strategy}stage_workers = {workers}\n");
        let replica = stages(model, &strategy, devices).await;
        of_group(&replica).take_place(Some(place)).await.unwrap();
        replicas.push(replica);
    }
    Group(replicas)
}

fn of_group(replica: &DeviceReplicas) -> &dyn StageSteps {
    let mirror = replica.mirror().expect("it keeps values");
    mirror.first().stages().expect("it has stages")
}

/// Carries messages from one worker to another.
async fn carry(mut from: Receiver<bytes::Bytes>, to: Sender<bytes::Bytes>) {
    while let Some(message) = from.recv().await {
        let _ = to.send(message).await;
    }
}

/// Adds up the numbers of all workers, until one of them asks for no more.
async fn add_up(mut all: Vec<Rounds>) {
    loop {
        let asked = join_all(all.iter_mut().map(Rounds::next)).await;
        let Some(asked) = asked.into_iter().collect::<Option<Vec<Round>>>() else {
            return;
        };
        let mut sum = vec![0.0; asked[0].values.len()];
        for round in &asked {
            assert_eq!(round.values.len(), sum.len());
            sum.iter_mut()
                .zip(&round.values)
                .for_each(|(sum, value)| *sum += value);
        }
        for round in asked {
            let _ = round.sum.send(sum.clone());
        }
    }
}

impl Group {
    /// Computes a step. Returns what each worker has computed.
    async fn compute(
        &self,
        positions: Positions,
    ) -> Vec<std::result::Result<Computed, ReplicaError>> {
        let workers = self.0.len();
        let ends = (0..workers).map(|place| Neighbours::new(place > 0, place + 1 < workers));
        let (sides, carriers): (Vec<Neighbours>, Vec<Carrier>) = ends.unzip();
        let (begun, rounds): (Vec<_>, Vec<_>) = carriers
            .into_iter()
            .map(|carrier| (carrier.carried, carrier.rounds))
            .unzip();
        let carrying = async {
            let (mut ways, mut behind) = (Vec::new(), None::<Ends>);
            for carried in begun {
                let carried = carried.await.expect("all begin their passes");
                if let (Some(last), Some(this)) = (behind, carried.before) {
                    ways.push(carry(last.outgoing, this.incoming));
                    ways.push(carry(this.outgoing, last.incoming));
                }
                behind = carried.next;
            }
            join_all(ways).await;
        };
        let computing = self.0.iter().zip(sides).map(async |(replica, side)| {
            replica.prepare(positions).await;
            let step = of_group(replica).compute_in_stages(side, positions, Step::default());
            step.await
        });
        let all = async { tokio::join!(join_all(computing), carrying, add_up(rounds)).0 };
        let timeout = tokio::time::timeout(Duration::from_secs(60), all);
        timeout.await.expect("the stages hang")
    }

    /// Computes a step, and joins the gradients of all workers. Each variable has one worker.
    async fn joined(&self, positions: Positions) -> Computed {
        let computed = self.compute(positions).await;
        let mut computed: Vec<Computed> = computed.into_iter().map(Result::unwrap).collect();
        let mut whole = computed.pop().unwrap();
        for other in computed {
            assert_eq!(
                (other.loss, other.gradients.norm),
                (whole.loss, whole.gradients.norm)
            );
            let pairs = whole
                .gradients
                .values
                .iter_mut()
                .zip(other.gradients.values);
            for ((own, other), spec) in pairs.zip(&self.0[0].description().variables) {
                // The change of a running statistic is 0 on other workers.
                if spec.name.contains("running_") {
                    let sum = numbers(own).into_iter().zip(numbers(&other));
                    *own = sum.map(|(a, b)| a + b).collect::<Vec<f32>>().into();
                    continue;
                }
                assert!(
                    own.is_empty() || other.is_empty(),
                    "two workers have {spec}"
                );
                if own.is_empty() {
                    *own = other;
                }
            }
        }
        whole
    }
}

/// Settings of four stages on workers and devices: the proof asks for 2 and 4 workers.
const GROUPS: [(&str, usize, usize); 4] = [
    ("schedule = \"gpipe\"\n", 4, 1),
    ("schedule = \"1f1b\"\nstages = 4\n", 2, 1),
    ("schedule = \"1f1b\"\n", 2, 2),
    ("stages = 4\n", 3, 1),
];

#[tokio::test]
async fn stages_on_several_workers_compute_what_one_device_does() {
    for model in [MLP, OWN, CNN, TRANSFORMER, FROZEN, CATEGORIES] {
        let alone = one_device(model).await;
        let in_turn = stages(model, "micro_batches = 6\n", 1).await;
        for (strategy, workers, devices) in GROUPS {
            let group = group(
                model,
                &format!("{strategy}micro_batches = 6\n"),
                workers,
                devices,
            )
            .await;
            for samples in [16, 3] {
                let all = positions(5, samples);
                let (expected, found) = (compute(&alone, all).await, group.joined(all).await);
                let error = difference(&found.gradients, &expected.gradients);
                let what = format!("{model}{strategy}{workers} workers, {samples} samples");
                assert!(error < 1e-5, "{what}: {error:.1e}");
                assert!((found.loss - expected.loss).abs() < 1e-5, "{what}");
                let norms = (found.gradients.norm, expected.gradients.norm);
                assert!(
                    (norms.0 - norms.1).abs() < 1e-5 * norms.1,
                    "{what}: {norms:?}"
                );
                // The bits depend neither on workers, nor on stages, nor on the time.
                let of_one = compute(&in_turn, all).await;
                for _ in 0..2 {
                    let again = group.joined(all).await;
                    assert_eq!(again.gradients.values, of_one.gradients.values, "{what}");
                }
            }
        }
    }
}

#[tokio::test]
async fn norms_statistics_and_random_numbers_are_those_of_the_whole_model() {
    let by_norm = format!("clip_norm = 0.05\n{MLP}");
    let by_both = format!("clip_norm = 0.02\nclip_value = 0.001\n{MLP}");
    let accumulated = format!("batch_size = 2\naccumulate = 3\n{RESNET}");
    for (model, micro_batches) in [
        (&by_norm[..], 4),
        (&by_both, 4),
        (RESNET, 4),
        (DROPOUT, 4),
        (BF16, 1),
        (&accumulated, 2),
    ] {
        let settings = format!("micro_batches = {micro_batches}\n");
        // The group computes batches as large as those of all its workers.
        let whole = model.replace("batch_size = 2\n", "batch_size = 4\n");
        let alone = stages(&whole, &settings, 1).await;
        let all = positions(3, 14);
        let expected = compute(&alone, all).await;
        let group = group(model, &format!("{settings}stages = 4\n"), 2, 1).await;
        let found = group.joined(all).await;
        let error = difference(&found.gradients, &expected.gradients);
        assert!(error < 1e-6, "{model}: {error:.1e}");
        assert!((found.loss - expected.loss).abs() < 1e-6, "{model}");
    }
}

#[tokio::test]
async fn a_stage_that_fails_ends_the_step_of_its_group() {
    for (at, panics, workers) in [(0, "", 2), (1, "instead = \"panic\"\n", 4), (3, "", 2)] {
        let own = format!("[model]\nname = \"fails\"\n[model.options]\nat = {at}\n{panics}");
        let group = group(&own, "micro_batches = 6\nstages = 4\n", workers, 1).await;
        // The last two of these micro-batches have 3 samples.
        let computed = group.compute(positions(0, 14)).await;
        let failed = computed.into_iter().map(|c| c.unwrap_err().to_string());
        let failed: Vec<String> = failed.collect();
        let stage = format!("stage {at} of 4 (block {at} on cpu");
        let with_stage = failed.iter().filter(|error| error.contains(&stage));
        assert_eq!(with_stage.count(), 1, "{failed:?}");
        // The next step is as if nothing had been.
        group.joined(positions(14, 12)).await;
    }
}

#[tokio::test]
async fn a_worker_that_loses_a_neighbour_ends_its_passes() {
    let group = group(MLP, "stages = 4\n", 2, 1).await;
    let first = &group.0[0];
    let values = first.state().await.unwrap();
    first.prepare(positions(0, 8)).await;
    let (side, carrier) = Neighbours::new(false, true);
    let step = of_group(first).compute_in_stages(side, positions(0, 8), Step::default());
    let lost = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(carrier);
    };
    let (computed, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(60), step), lost);
    let error = computed.expect("it hangs").unwrap_err();
    assert!(error.to_string().contains("lost each other"), "{error}");
    assert_eq!(first.state().await.unwrap(), values);
    // The next step is made as if nothing had been.
    group.joined(positions(8, 8)).await;
}

#[tokio::test]
async fn all_workers_of_a_group_see_a_gradient_that_is_not_finite() {
    let model =
        "clip_norm = 1.0\n[model]\nname = \"fails\"\n[model.options]\nat = 3\ninstead = \"nan\"\n";
    let group = group(model, "micro_batches = 6\nstages = 4\n", 4, 1).await;
    for computed in group.compute(positions(0, 14)).await {
        assert!(computed.unwrap().gradients.norm.is_nan());
    }
    let after = group.joined(positions(14, 12)).await;
    assert!(after.gradients.norm.is_finite());
}

/// The time of a step is taken from outside, and what all stages take is known. The stages sleep, so that any number of workers finds a
/// core.
#[tokio::test]
#[ignore = "it measures time: cargo test -p flambeau-replica --test model_parallel -- --ignored --nocapture the_bubble_of_workers"]
async fn the_bubble_of_workers_is_near_that_of_the_formula() {
    println!("workers  schedule  micro-batches  measured  (p-1)/(m+p-1)");
    for workers in [2, 4] {
        for schedule in ["gpipe", "1f1b"] {
            for micro_batches in [4, 8, 16] {
                let strategy = format!(
                    "schedule = \"{schedule}\"\nstages = 4\nmicro_batches = {micro_batches}\n"
                );
                let group = group("[model]\nname = \"sleepy\"\n", &strategy, workers, 1).await;
                let begun = Instant::now();
                for computed in group.compute(positions(0, 32)).await {
                    computed.unwrap();
                }
                let took = begun.elapsed().as_secs_f64() * workers as f64;
                let busy = (FORWARD + BACKWARD).as_secs_f64() * 4.0 * micro_batches as f64;
                let waits = (workers - 1) as f64;
                let formula = waits / (micro_batches as f64 + waits);
                let measured = 1.0 - busy / took;
                println!(
                    "{workers:7}  {schedule:8}  {micro_batches:13}  {measured:8.3}  {formula:.3}"
                );
                assert!((measured - formula).abs() < 0.1);
            }
        }
    }
}
