//! Messages with one thing wrong each.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn bad_messages_are_refused_by_name_and_change_nothing() {
    let mut scene = Scene::new().await;
    let good = vec![1.0; 4];
    let beyond = wire::BlockId {
        variable: 0,
        index: 1,
    };
    let stranger = wire::BlockId {
        variable: 7,
        index: 0,
    };
    let of = |block: wire::BlockId, values: &[f32]| vec![(block, values.to_vec())];
    // Each push has one mistake; its valid parts must not be applied either.
    let cases = [
        (
            of(W, &[1.0; 3]),
            Reason::WrongShape,
            "block 0 of variable \"w\" has 12 bytes",
        ),
        (
            of(stranger, &good),
            Reason::UnknownVariable,
            "no variable number 7",
        ),
        (
            of(beyond, &good),
            Reason::UnknownBlock,
            "variable \"w\" of shape [4] has no block 1",
        ),
        (
            of(W, &[1.0, f32::NAN, 1.0, 1.0]),
            Reason::NonFinite,
            "variable \"w\" holds NaN",
        ),
        (
            of(W, &[1.0, f32::INFINITY, 1.0, 1.0]),
            Reason::NonFinite,
            "infinity",
        ),
        (
            [of(W, &good), of(stranger, &good)].concat(),
            Reason::UnknownVariable,
            "number 7",
        ),
    ];
    for (gradients, reason, named) in cases {
        let push = scene.peer.push(0, &gradients);
        let (found, message) = scene.refused(push).await;
        assert_eq!(found, reason, "{message}");
        assert!(message.contains(named), "{message}");
    }

    let good = scene.peer.push(0, &of(W, &good));
    type Change = fn(&mut wire::Push);
    let changes: [(Change, Reason, &str); 10] = [
        (
            |p| p.gradients.push(p.gradients[0].clone()),
            Reason::Malformed,
            "named twice",
        ),
        (|p| origin(p).sequence = 0, Reason::Malformed, "sequence"),
        (
            |p| origin(p).job = "other".into(),
            Reason::ForeignJob,
            "job \"other\"",
        ),
        (|p| task(p).generation = 9, Reason::Fenced, "generation 9"),
        (|p| task(p).index = 5, Reason::Malformed, "worker-5"),
        (|p| origin(p).epoch = 3, Reason::StaleEpoch, "epoch 3"),
        (|p| origin(p).clock = 3, Reason::FutureClock, "clock 3"),
        (|p| p.origin = None, Reason::Malformed, "origin"),
        (|p| p.gradients[0].block = None, Reason::Malformed, "block"),
        (|p| payload_of(p).dtype = 9, Reason::WrongDtype, "9"),
    ];
    for (change, reason, named) in changes {
        let mut push = good.clone();
        change(&mut push);
        let (found, message) = scene.refused(push).await;
        assert_eq!(found, reason, "{message}");
        assert!(message.contains(named), "{message}");
    }
    let mut rows = good.clone();
    payload_of(&mut rows).values = Some(wire::payload::Values::Rows(wire::Rows::default()));
    assert_eq!(scene.refused(rows).await.0, Reason::WrongDtype);
    let initialize = wire::Initialize {
        origin: good.origin.clone(),
        blocks: Vec::new(),
    };
    let (reason, _) = scene.session.refused(Kind::Initialize(initialize)).await;
    assert_eq!(reason, Reason::NotLeased);
    for (pull, expected) in [
        (scene.peer.pull(9, &[W]), Reason::FutureClock),
        (scene.peer.pull(0, &[W, W]), Reason::Malformed),
        (scene.peer.pull(0, &[stranger]), Reason::UnknownVariable),
    ] {
        let (reason, _) = scene.session.refused(Kind::Pull(pull)).await;
        assert_eq!(reason, expected);
    }

    assert_eq!(scene.weights().await, (vec![0.0; 4], 0));
    let metrics = scene.cluster.ps[0].http("/metrics");
    assert!(
        metrics.contains("flambeau_ps_refused_total{reason=\"wrong_shape\"} 1"),
        "{metrics}"
    );
    // The session still works.
    let answer = scene.session.ask(Kind::Push(good)).await;
    assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
    assert_eq!(scene.weights().await, (vec![-1.0; 4], 1));
}

fn origin(push: &mut wire::Push) -> &mut wire::Origin {
    push.origin.as_mut().unwrap()
}

fn task(push: &mut wire::Push) -> &mut wire::Task {
    origin(push).task.as_mut().unwrap()
}

fn payload_of(push: &mut wire::Push) -> &mut wire::Payload {
    push.gradients[0].payload.as_mut().unwrap()
}
