//! Many kills of workers of a ring. It takes minutes:
//! `cargo test -p tests --test end_to_end --release -- --ignored a_hundred_kills`.

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tests::{Cluster, eventually, say};

use crate::program;
use crate::rings::{MIRRORED, a_class_for_each};
use crate::weights::weights;

const WORKERS: usize = 4;
const KILLS: usize = 100;
const SAMPLES: usize = 12_000;

/// Workers are killed at random moments and started again. No job and no sample is lost, and no other worker starts again.
#[test]
#[ignore = "it takes minutes; it measures the time from a kill to the next step"]
fn a_hundred_kills_lose_nothing() {
    let data = a_class_for_each(SAMPLES);
    let job = format!(
        "epochs = 1\nbatch_size = 1\n[data]\nkind = \"csv\"\ndir = {:?}\ntarget = \"class\"\n[model]\nname = \"visits\"\n[optimizer]\nname = \"sgd\"\nlearning_rate = 1.0\n{MIRRORED}[cluster]\nworkers = {WORKERS}\n",
        data.path()
    );
    let seed = rand::random();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let slow = [("TEST_STEP_MILLISECONDS", "20")];
    let mut cluster = Cluster::start(program(), &job, 0);
    for _ in 0..WORKERS {
        cluster.add_worker(&slow);
    }
    let steps = |cluster: &Cluster| cluster.status()["steps"].as_u64().unwrap();
    let in_ring = |cluster: &Cluster| {
        let status = cluster.status();
        let members = status["ring"]["members"].as_array().map_or(0, Vec::len);
        status["ring"]["stage"] == "settled" && members == WORKERS
    };
    let mut seconds = Vec::new();
    for _ in 0..KILLS {
        eventually(|| in_ring(&cluster));
        std::thread::sleep(Duration::from_millis(random.random_range(0..500)));
        let victim = random.random_range(0..WORKERS);
        let others = (0..WORKERS).filter(|worker| *worker != victim);
        let others: Vec<u32> = others.map(|w| cluster.workers[w].process()).collect();
        cluster.workers[victim].kill();
        let (killed, before) = (Instant::now(), steps(&cluster));
        cluster.restart_worker(victim, &slow);
        eventually(|| steps(&cluster) > before + 1);
        seconds.push(killed.elapsed().as_secs_f64());
        for process in others {
            assert!(tests::exists(process), "a survivor has ended, seed {seed}");
        }
    }
    let (summary, dir) = cluster.finish();
    assert_eq!(summary["samples"], SAMPLES, "seed {seed}");
    seconds.sort_by(f64::total_cmp);
    let (median, longest) = (seconds[KILLS / 2], seconds[KILLS - 1]);
    say(&format!(
        "{KILLS} kills, seed {seed}: {median:.2} s to the next step (median), {longest:.2} s at the most"
    ));
    let model = weights(&dir.path().join("run/model.safetensors"));
    for (name, values) in &model {
        for (sample, visits) in values.to_vec1::<f32>().unwrap().into_iter().enumerate() {
            let workers = (1.0 / visits).round();
            let once =
                (1.0..=WORKERS as f32).contains(&workers) && (1.0 / visits - workers).abs() < 1e-3;
            assert!(
                once,
                "{name}: sample {sample} was visited {visits} times, seed {seed}"
            );
        }
    }
}
