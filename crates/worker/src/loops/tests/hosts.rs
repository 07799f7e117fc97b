//! Loops on several hosts, here several threads with links on loopback.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::*;
use ::replica::panic_message;
use shared_proto::task;

/// Returns addresses of ports that are free. Each call has a loopback address of its own, so that no other test takes the ports before
/// the hosts listen on them.
fn addresses(count: usize) -> Vec<String> {
    static CALLS: AtomicU32 = AtomicU32::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let call = CALLS.fetch_add(1, Relaxed) as u8;
    let own = Ipv4Addr::new(127, 1 + high % 200, low, call);
    let bind = |_| TcpListener::bind((own, 0)).unwrap();
    let listeners: Vec<TcpListener> = (0..count).map(bind).collect();
    let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
    listeners.iter().map(address).collect()
}

/// Runs a program on each host, which has these devices. Returns what each has returned.
fn on_each<T: Send + 'static>(
    devices: &[&'static str],
    program: impl Fn(Result<Strategy, LoopError>) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let all = addresses(devices.len());
    let start = |(index, devices): (usize, &&'static str)| {
        let (all, program, devices) = (all.clone(), program.clone(), *devices);
        let hosts = Hosts::new(all, index).patience(Duration::from_secs(60));
        let run = move || program(Strategy::on_hosts(&hosts, devices));
        Builder::new().name(format!("host {index}")).spawn(run)
    };
    let threads: Vec<JoinHandle<T>> = devices
        .iter()
        .enumerate()
        .map(|each| start(each).unwrap())
        .collect();
    let ended = |thread: JoinHandle<T>| thread.join().unwrap();
    threads.into_iter().map(ended).collect()
}

#[test]
fn replicas_of_several_hosts_make_the_steps_of_one_process() {
    for (devices, parts) in [
        (vec!["cpu", "cpu"], vec![6, 6]),
        (vec!["cpu,cpu", "cpu"], vec![5, 4, 3]),
        (vec!["cpu", "cpu", "cpu,cpu"], vec![2, 4, 5, 1]),
    ] {
        let optimizer = Optimizer::Adam(Adam::default());
        let alone = train(&[12], &optimizer);
        let once = || {
            let (parts, optimizer) = (parts.clone(), optimizer.clone());
            let program = move |strategy: Result<Strategy, LoopError>| {
                train_by(&strategy.unwrap(), &parts, &optimizer)
            };
            on_each(&devices, program).concat()
        };
        let together = once();
        assert_eq!(together.len(), parts.len());
        assert!(together.iter().all(|replica| *replica == together[0]));
        assert_eq!(together, once(), "a repeated run");
        let pairs = together[0].iter().flatten().zip(alone[0].iter().flatten());
        let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 1e-5, "{devices:?} {parts:?}: {largest}");
    }
}

#[test]
fn each_host_gets_the_numbers_and_tensors_of_all() {
    let seen = on_each(&["cpu,cpu", "cpu"], |strategy| {
        let strategy = strategy.unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        let indices = model.run(|replica| {
            assert_eq!(replica.replicas(), 3);
            Ok(replica.index())
        });
        let indices = indices.unwrap();
        // Each has as many rows as its index says, and more.
        let row = |index: &usize| {
            let values = vec![*index as u32 + 7; (index + 1) * 2];
            Tensor::from_vec(values, (index + 1, 2), &Device::Cpu).unwrap()
        };
        let rows: Vec<Tensor> = indices.iter().map(row).collect();
        let numbers: Vec<f64> = indices.iter().map(|index| *index as f64).collect();
        (
            strategy.host(),
            strategy.replicas(),
            indices,
            strategy.reduce(Reduce::Sum, &numbers).unwrap(),
            strategy.reduce(Reduce::Mean, &numbers).unwrap(),
            strategy.gather(&rows).unwrap().to_vec2::<u32>().unwrap(),
        )
    });
    let all = [7, 8, 8, 9, 9, 9].map(|value| vec![value; 2]).to_vec();
    for (host, indices) in [(0, vec![0, 1]), (1, vec![2])] {
        let expected = (host, 3, indices, 3.0, 1.0, all.clone());
        assert_eq!(seen[host], expected);
    }
}

#[test]
fn replicas_of_several_hosts_add_up_more_numbers_than_a_message_has() {
    const COUNT: usize = 600_001;
    let sums = on_each(&["cpu", "cpu,cpu"], |strategy| {
        let mut model = strategy.unwrap().scope(3, net).unwrap();
        let sums = model.run(|replica| {
            let index = replica.index() as f64;
            let numbers: Vec<f64> = (0..COUNT).map(|i| i as f64 + index).collect();
            replica.sum(&numbers)
        });
        sums.unwrap()
    });
    for sums in sums.concat() {
        assert_eq!(sums.len(), COUNT);
        let wrong = (0..COUNT).find(|i| sums[*i] != 3.0 * *i as f64 + 3.0);
        assert_eq!(wrong, None);
    }
}

#[test]
fn a_host_that_fails_or_panics_ends_the_steps_of_the_others() {
    let failing: [fn() -> candle_core::Result<()>; 2] = [
        || Err(candle_core::Error::msg("the disk is full")),
        || panic!("upside down"),
    ];
    for fail in failing {
        let errors = on_each(&["cpu", "cpu", "cpu"], move |strategy| {
            let strategy = strategy.unwrap();
            let run = || {
                let mut model = strategy.scope(3, net).unwrap();
                for step in 0..1000 {
                    let done = model.run(|replica| match (replica.index(), step) {
                        (1, 3) => fail(),
                        _ => replica.sum(&[1.0]).map(drop),
                    });
                    if let Err(error) = done {
                        assert_eq!(step, 3);
                        // Nobody hangs at the next attempt either.
                        assert!(model.run(|_| Ok(())).is_err());
                        return error.to_string();
                    }
                }
                unreachable!("no step fails");
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
                .unwrap_or_else(|panic| panic_message(&*panic))
        });
        assert!(
            errors[1].contains("the disk is full") || errors[1].contains("upside down"),
            "{errors:?}"
        );
        for error in [&errors[0], &errors[2]] {
            assert!(error.contains("of the loop (127."), "{errors:?}");
            assert!(error.contains("start the program again"), "{errors:?}");
        }
    }
}

#[test]
fn a_host_that_starts_again_waits_for_the_others_to_do_so() {
    let all = addresses(2);
    // Each program runs twice: the second host fails in its first run, and is back before the first host notices.
    let meet = |all: &[String], index| {
        let hosts = Hosts::new(all.to_vec(), index).patience(Duration::from_secs(60));
        for _ in 0..1000 {
            match Strategy::on_hosts(&hosts, "cpu") {
                // The earlier run still listens.
                Err(error) if error.to_string().contains("cannot listen") => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                met => return met.unwrap(),
            }
        }
        panic!("the earlier run does not end");
    };
    let (back, is_back) = std::sync::mpsc::sync_channel(1);
    let addresses = all.clone();
    let first = std::thread::spawn(move || {
        let strategy = meet(&addresses, 0);
        let mut model = strategy.scope(3, net).unwrap();
        is_back.recv().unwrap();
        // The second host's new process dials meanwhile, and is refused as long as this one runs.
        std::thread::sleep(Duration::from_millis(500));
        let lost = model.run(|replica| replica.sum(&[1.0])).unwrap_err();
        drop((model, strategy));
        let strategy = meet(&addresses, 0);
        let mut model = strategy.scope(3, net).unwrap();
        let sum = model.run(|replica| replica.sum(&[1.0])).unwrap();
        (lost.to_string(), sum)
    });
    let strategy = meet(&all, 1);
    let mut model = strategy.scope(3, net).unwrap();
    let failed = model.run(|_| -> candle_core::Result<()> { Err(candle_core::Error::msg("full")) });
    assert!(failed.is_err());
    drop((model, strategy));
    back.send(()).unwrap();
    let strategy = meet(&all, 1);
    let mut model = strategy.scope(3, net).unwrap();
    let sum = model.run(|replica| replica.sum(&[1.0])).unwrap();
    assert_eq!(sum, [[2.0]]);
    let (lost, sum) = first.join().unwrap();
    assert!(lost.contains("start the program again"), "{lost}");
    assert_eq!(sum, [[2.0]]);
}

#[test]
fn hosts_that_differ_are_noticed() {
    // Another seed, and so other values.
    let errors = on_each(&["cpu", "cpu"], |strategy| {
        let strategy = strategy.unwrap();
        let seed = strategy.host() as u64;
        strategy.scope(seed, net).map(drop).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|e| e.contains("the same seed")),
        "{errors:?}"
    );
    // One makes fewer steps, or another call.
    let errors = on_each(&["cpu", "cpu"], |strategy| {
        let strategy = strategy.unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        for _ in 0..2 + strategy.host() {
            let step = model.run(|replica| replica.sum(&[1.0]));
            if let Err(error) = step {
                return error.to_string();
            }
        }
        String::new()
    });
    assert_eq!(errors[0], "");
    assert!(errors[1].contains("has ended earlier"), "{errors:?}");
    let errors = on_each(&["cpu", "cpu"], |strategy| {
        let strategy = strategy.unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        match strategy.host() {
            0 => strategy.reduce(Reduce::Sum, &[1.0]).unwrap_err(),
            _ => model.run(|replica| replica.sum(&[1.0])).unwrap_err(),
        }
        .to_string()
    });
    assert!(
        errors.iter().all(|e| e.contains("different calls")),
        "{errors:?}"
    );
}

#[test]
fn models_that_are_used_in_different_orders_are_not_added_up() {
    let errors = on_each(&["cpu", "cpu"], |strategy| {
        let strategy = strategy.unwrap();
        let mut models = [0, 1].map(|_| strategy.scope(3, net).unwrap());
        let first = strategy.host();
        let sum = models[first].run(|replica| replica.sum(&[1.0]));
        sum.unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|e| e.contains("different calls")),
        "{errors:?}"
    );
}

#[test]
fn a_file_that_no_host_can_read_does_not_end_the_loop() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.safetensors");
    let kept = file.clone();
    let seen = on_each(&["cpu", "cpu"], move |strategy| {
        let strategy = strategy.unwrap();
        let mut model = strategy.scope(3, net).unwrap();
        let missing = model.load(&kept).unwrap_err().to_string();
        let sums = model.run(|replica| replica.sum(&[1.0])).unwrap();
        // One host has the file, and another does not.
        let one = match strategy.host() {
            0 => model.save(&kept).and_then(|()| model.load(&kept)),
            _ => model.load("/nowhere.safetensors"),
        };
        (missing, sums, one.unwrap_err().to_string())
    });
    for (missing, sums, one) in seen {
        assert!(missing.contains("model.safetensors"), "{missing}");
        assert_eq!(sums, [[2.0]]);
        assert!(one.contains("different variables, values"), "{one}");
    }
}

#[test]
fn wrong_lists_of_hosts_are_refused_with_the_reason() {
    let quick = |hosts: Hosts| {
        let hosts = hosts.patience(Duration::from_millis(200));
        Strategy::on_hosts(&hosts, "cpu").unwrap_err().to_string()
    };
    let two = addresses(2);
    let error = quick(Hosts::new(two.clone(), 2));
    assert!(
        error.contains("is 2") && error.contains("2 addresses"),
        "{error}"
    );
    for wrong in ["here", "here:0", "unix:/tmp/x", ":1"] {
        let error = quick(Hosts::new([two[0].as_str(), wrong], 0));
        assert!(
            error.contains(wrong) && error.contains("host:port"),
            "{error}"
        );
    }
    let error = quick(Hosts::new([two[0].clone(), two[0].clone()], 0));
    assert!(error.contains("twice"), "{error}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().map(|address| (address, taken)).unwrap();
    let error = quick(Hosts::new([taken.0.to_string(), two[0].clone()], 0));
    assert!(error.contains("cannot listen"), "{error}");
    let error = quick(Hosts::new([two[0].clone(), two[1].clone()], 0));
    assert!(
        error.contains(&two[1]) && error.contains("is lost"),
        "{error}"
    );
}

#[test]
fn hosts_with_different_lists_refuse_each_other() {
    let three = addresses(3);
    let two = three[..2].to_vec();
    let first = Hosts::new(three, 0).patience(Duration::from_secs(3));
    let thread = std::thread::spawn(move || Strategy::on_hosts(&first, "cpu").map(drop));
    // It does not wait for this time: the refusal is final.
    let second = Hosts::new(two, 1).patience(Duration::from_secs(600));
    let error = Strategy::on_hosts(&second, "cpu").unwrap_err().to_string();
    assert!(error.contains("of another run"), "{error}");
    let error = thread.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("not connected in time"), "{error}");
}

#[tokio::test]
async fn a_loop_on_several_hosts_may_run_within_an_asynchronous_runtime() {
    let sums = on_each(&["cpu", "cpu"], |strategy| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        task::block_on(&runtime, async {
            let strategy = strategy.unwrap();
            let mut model = strategy.scope(3, net).unwrap();
            // Many, because a task has a budget of operations.
            for _ in 0..100 {
                strategy.reduce(Reduce::Sum, &[1.0]).unwrap();
                model.run(|replica| replica.sum(&[1.0])).unwrap();
            }
            model.run(|replica| replica.sum(&[1.0])).unwrap()
        })
    });
    assert_eq!(sums, [[[2.0]], [[2.0]]]);
}
