//! The settings of a job, and whether each may change when a run goes on.

use self::Outcome::{Refused, Resumes};

/// What becomes of a run that goes on with another setting.
#[derive(Clone, Copy)]
pub(super) enum Outcome {
    /// It goes on.
    Resumes,
    /// It is refused, and the message has this text.
    Refused(&'static str),
}

/// A setting, the flags that change it, and the outcome. `DIR` stands for the folder of the test.
pub(super) const SETTINGS: &[(&str, &str, Outcome)] = &[
    ("name", "name=other", Refused("name is flambeau there")),
    ("seed", "seed=9", Refused("seed is 5 there")),
    ("epochs", "epochs=3", Resumes),
    ("steps", "steps=30", Resumes),
    (
        "batch_size",
        "batch_size=8",
        Refused("batch_size * accumulate"),
    ),
    (
        "accumulate",
        "accumulate=2",
        Refused("batch_size * accumulate"),
    ),
    ("non_finite", "non_finite=skip", Resumes),
    ("clip_value", "clip_value=0.5", Resumes),
    ("clip_norm", "clip_norm=1.0", Resumes),
    (
        "ema_decay",
        "ema_decay=0.9",
        Refused("ema_decay is absent there"),
    ),
    ("log_every", "log_every=3", Resumes),
    ("evaluations", "evaluations=last", Resumes),
    ("run_dir", "run_dir=DIR/another", Resumes),
    (
        "data.kind",
        "data.kind=digits",
        Refused("data.kind is csv there"),
    ),
    ("data.dir", "data.dir=DIR/moved", Resumes),
    (
        "data.label",
        "data.label=y",
        Refused("a finite number was expected"),
    ),
    ("data.target", "data.target=class", Resumes),
    (
        "data.held_out",
        "data.held_out=0.5",
        Refused("training samples"),
    ),
    ("data.prefetch", "data.prefetch=0", Resumes),
    (
        "data.stream",
        "data.stream=true",
        Refused("training samples"),
    ),
    (
        "data.shuffle_mebibytes",
        "data.shuffle_mebibytes=8",
        Resumes,
    ),
    (
        "data.columns",
        "data.columns.x.type=\"ignore\"",
        Refused("hidden.0.weight is [4, 2] there, and [4, 1] here"),
    ),
    ("data.delimiter", "data.delimiter=\",\"", Resumes),
    (
        "data.header",
        "data.header=false",
        Refused("no column is called"),
    ),
    (
        "data.column_names",
        "data.column_names=[\"x\"]",
        Refused("data.column_names"),
    ),
    ("data.decimal", "data.decimal=\",\"", Resumes),
    (
        "data.label_transform",
        "data.label_transform=standardise",
        Refused("label_transform"),
    ),
    ("data.missing", "data.missing=\"mean\"", Resumes),
    ("data.missing_texts", "data.missing_texts=[\"-\"]", Resumes),
    ("data.missing_label", "data.missing_label=skip", Resumes),
    (
        "data.weight",
        "data.weight=none",
        Refused("no column is called"),
    ),
    (
        "data.class_weight",
        "data.class_weight.a=2.0",
        Refused("class_weight"),
    ),
    (
        "data.pictures",
        "data.pictures.flip=true",
        Refused("pictures"),
    ),
    ("data.options", "data.options.depth=3", Refused("options")),
    (
        "model.name",
        "model.name=softmax",
        Refused("model.name is mlp there"),
    ),
    (
        "model.init_from",
        "model.init_from=DIR/run/model.safetensors",
        Resumes,
    ),
    ("model.init_strip", "model.init_strip=wrapper.", Resumes),
    (
        "model.init_except",
        "model.init_from=DIR/run/model.safetensors;model.init_except=[\"output.*\"]",
        Resumes,
    ),
    (
        "model.hidden",
        "model.hidden=[5]",
        Refused("hidden.0.bias is [4] there, and [5] here"),
    ),
    ("model.channels", "model.channels=[3]", Resumes),
    ("model.embedding", "model.embedding=3", Resumes),
    (
        "model.tables",
        "model.tables=true",
        Refused("no input of ids"),
    ),
    ("model.precision", "model.precision=bf16", Resumes),
    ("model.options", "model.options.depth=3", Refused("depth")),
    ("objective.loss", "objective.loss=cross-entropy", Resumes),
    (
        "objective.label_smoothing",
        "objective.label_smoothing=0.1",
        Resumes,
    ),
    (
        "objective.metrics",
        "objective.metrics=[\"log_loss\"]",
        Resumes,
    ),
    (
        "optimizer.name",
        "optimizer={name=\"sgd\"}",
        Refused("optimizer.name is adam there"),
    ),
    (
        "optimizer.learning_rate",
        "optimizer.learning_rate=0.01",
        Resumes,
    ),
    ("optimizer.beta1", "optimizer.beta1=0.8", Resumes),
    ("optimizer.beta2", "optimizer.beta2=0.99", Resumes),
    ("optimizer.epsilon", "optimizer.epsilon=1e-7", Resumes),
    (
        "optimizer.weight_decay",
        "optimizer.weight_decay=0.01",
        Resumes,
    ),
    ("schedule.kind", "schedule.kind=cosine", Resumes),
    ("schedule.warmup_steps", "schedule.warmup_steps=5", Resumes),
    ("schedule.step_every", "schedule.step_every=5", Resumes),
    ("schedule.step_factor", "schedule.step_factor=0.5", Resumes),
    ("schedule.total_steps", "schedule.total_steps=50", Resumes),
    ("schedule.floor", "schedule.floor=0.1", Resumes),
    (
        "groups",
        "groups=[{variables=\"*.bias\",learning_rate=0.1}]",
        Resumes,
    ),
    (
        "groups",
        "groups=[{variables=\"*.bias\",optimizer={name=\"sgd\"}}]",
        Refused("of another optimizer"),
    ),
    (
        "tables",
        "tables=[{tables=\"*\",buckets=4}]",
        Refused("matches no table"),
    ),
    (
        "strategy.name",
        "strategy={name=\"one-device\",mode=\"sync\"};cluster.workers=1",
        Resumes,
    ),
    ("strategy.mode", "strategy.mode=async", Resumes),
    (
        "strategy.mode",
        "strategy.mode=sync",
        Refused("strategy.mode = \"sync\" is false there"),
    ),
    ("strategy.staleness", "strategy.staleness=2", Resumes),
    (
        "strategy.correction",
        "strategy.correction={enabled=false}",
        Resumes,
    ),
    ("strategy.pipeline", "strategy.pipeline=1", Resumes),
    ("strategy.wire", "strategy.wire=bf16", Resumes),
    (
        "strategy.batch_norm",
        "strategy.batch_norm=synchronised",
        Refused("strategy.batch_norm"),
    ),
    (
        "strategy.optimizer_copies",
        "strategy.optimizer_copies=1",
        Refused("strategy.optimizer_copies"),
    ),
    (
        "strategy.bucket_mebibytes",
        "strategy.bucket_mebibytes=1.0",
        Refused("strategy.bucket_mebibytes"),
    ),
    (
        "strategy.cross_device",
        "strategy.cross_device=host",
        Refused("strategy.cross_device"),
    ),
    (
        "strategy.schedule",
        "strategy.schedule=gpipe",
        Refused("strategy.schedule"),
    ),
    (
        "strategy.micro_batches",
        "strategy.micro_batches=2",
        Refused("strategy.micro_batches"),
    ),
    (
        "strategy.stages",
        "strategy.stages=2",
        Refused("strategy.stages"),
    ),
    (
        "strategy.stage_workers",
        "strategy.stage_workers=2",
        Refused("strategy.stage_workers"),
    ),
    (
        "strategy.backup_workers",
        "strategy.backup_workers=1",
        Refused("strategy.backup_workers"),
    ),
    ("cluster.ps", "cluster.ps=2", Resumes),
    ("cluster.workers", "cluster.workers=2", Resumes),
    (
        "cluster.lease_seconds",
        "cluster.lease_seconds=5.0",
        Resumes,
    ),
    (
        "cluster.stall_seconds",
        "cluster.stall_seconds=60.0",
        Resumes,
    ),
    ("checkpoint.enabled", "checkpoint.enabled=false", Resumes),
    (
        "checkpoint.location",
        "checkpoint.location=DIR/elsewhere",
        Resumes,
    ),
    (
        "checkpoint.every_seconds",
        "checkpoint.every_seconds=1.0",
        Resumes,
    ),
    (
        "checkpoint.every_steps",
        "checkpoint.every_steps=5",
        Resumes,
    ),
    ("checkpoint.keep", "checkpoint.keep=1", Resumes),
    (
        "checkpoint.snapshot_mebibytes",
        "checkpoint.snapshot_mebibytes=8",
        Resumes,
    ),
    ("checkpoint.increments", "checkpoint.increments=0", Resumes),
    (
        "checkpoint.on_full_disk",
        "checkpoint.on_full_disk=stop",
        Resumes,
    ),
    (
        "early_stopping.metric",
        "early_stopping.metric=accuracy",
        Resumes,
    ),
    ("early_stopping.goal", "early_stopping.goal=max", Resumes),
    (
        "early_stopping.patience",
        "early_stopping.patience=5",
        Resumes,
    ),
    (
        "early_stopping.min_delta",
        "early_stopping.min_delta=0.1",
        Resumes,
    ),
    ("plateau.metric", "plateau.metric=accuracy", Resumes),
    ("plateau.goal", "plateau.goal=max", Resumes),
    ("plateau.factor", "plateau.factor=0.5", Resumes),
    ("plateau.patience", "plateau.patience=2", Resumes),
    ("plateau.min_delta", "plateau.min_delta=0.1", Resumes),
    ("plateau.cooldown", "plateau.cooldown=1", Resumes),
    (
        "plateau.min_learning_rate",
        "plateau.min_learning_rate=0.0001",
        Resumes,
    ),
    ("best.metric", "best.metric=accuracy", Resumes),
    ("best.goal", "best.goal=max", Resumes),
];
