//! The job file that `flambeau job init` writes.

/// The column in which the comments of settings begin.
const COMMENTS: usize = 24;

/// The maximum width of a line of names, in characters.
const WIDTH: usize = 120;

/// Returns a job file with every setting and its default. Settings that are absent by default stand behind `#: `.
/// `sources` and `models` are the names of data sources and of models that a job can use.
pub fn template<'a>(
    sources: impl Iterator<Item = &'a str>,
    models: impl Iterator<Item = &'a str>,
) -> String {
    let sources = comment(sources.chain(["a source of your own"]));
    let models = comment(models.chain(["a model of your own"]));
    TEMPLATE
        .replace("# SOURCES", &sources)
        .replace("# MODELS", &models)
}

/// Returns names as a comment, in lines of at most `WIDTH` characters.
fn comment<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let (mut text, mut column) = ("#".to_owned(), COMMENTS + 1);
    for (number, name) in names.enumerate() {
        let before = if number > 0 { " | " } else { " " };
        if column + before.len() + name.len() > WIDTH {
            text += &format!("\n{:COMMENTS$}#", "");
            column = COMMENTS + 1;
        }
        text += &format!("{before}{name}");
        column += before.len() + name.len();
    }
    text
}

/// The file, with `# SOURCES` and `# MODELS` in place of names.
const TEMPLATE: &str = r##"# A Flambeau job: what is trained, and how. Every setting is shown with its default; delete what
# you do not change. Lines that begin with "#: " are settings that are absent by default.
# Flags override this file: `flambeau train this.toml --epochs 3`.

name = "flambeau"       # messages of another job are refused
seed = 1                # decides initial values, the order of samples, which are held out
epochs = 20             # passes over the training data
#: steps = 1000         # stop after so many steps, summed over workers (sync: committed steps)
batch_size = 32         # samples that a worker computes together
accumulate = 1          # batches in a worker's step, as if it had one so many times as large (not in batch normalisation)
non_finite = "fail"     # fail | skip: the response to a step with a NaN or infinite gradient
#: clip_value = 1.0     # limit each element of a step's gradient (in sync mode with servers the mean over all workers) to this absolute value
#: clip_norm = 1.0      # scale a step's gradient down to this global norm where it exceeds it
#: ema_decay = 0.999    # evaluate and save a moving average of the weights; the share of it that remains in an update
log_every = 10          # steps between two lines of metrics.jsonl, summed over workers
evaluations = "each-epoch" # each-epoch | last: the passes after which a worker evaluates the model
#: run_dir = "runs/mine" # where the run is recorded; absent: a new folder under runs/

[data]
kind = "digits"         # the digits are part of the program; others (docs/data.md):
                        # SOURCES
#: dir = "data/mnist"   # where the files are (docs/data.md): a folder, a file, a pattern of names, or s3://bucket/...
label = "label"         # csv, parquet: the column with the label
target = "auto"         # csv, parquet, libsvm: auto (by the labels) | class | binary | number
#: label_transform = "standardise" # labels that are numbers: the model learns them with mean 0 and deviation 1
held_out = 0.2          # the share of samples held out for evaluation, where they have no file of their own
prefetch = 1            # batches that a worker reads before it needs them, while it computes
stream = false          # true: samples stay in their files and are read in each pass (docs/data.md)
shuffle_mebibytes = 64  # streamed data: how much of the files is shuffled together; a worker holds twice as much
#: columns = { city = { type = "category", buckets = 9 } } # csv, parquet: what columns are (docs/data.md)
#: decimal = ","        # csv: the character before the fraction of numbers
#: weight = "importance" # csv, parquet: the column with the weight of each sample in loss and metrics
#: class_weight = { "1" = 5.0 } # the weights of labels in loss and metrics; others have 1
#: pictures = { flip = true, crop = 4 } # samples that are pictures: how they are resized and varied (docs/data.md)
#: options = { arms = 3 } # settings of the source's own (docs/data.md), or of one that you have written

[model]
name = "mlp"            # MODELS
#: init_from = "pretrained.safetensors" # initial values (or .pth); variables that the file lacks have their usual ones
#: init_except = ["output.*"] # variables that do not take theirs from that file
hidden = [256]          # widths of the hidden layers (mlp, cnn)
channels = [16, 32]     # channels of the convolutions (cnn)
embedding = 16          # elements of the vector of a category (mlp, factorization-machine, deepfm, wide-deep, dlrm, two-tower)
tables = false          # true: the vectors of categories are rows of tables (logistic, mlp, factorization-machine; docs/tables.md)
precision = "f32"       # f32 | bf16: numbers in matrix products and convolutions; bf16 is for GPUs, weights stay f32
#: options = { depth = 3 } # settings of the transformer (size, heads, layers, feed_forward, dropout), or of your own model

[objective]
loss = "auto"           # auto (by the target) | cross-entropy | binary-cross-entropy | mean-squared-error | mean-absolute-error | model
label_smoothing = 0.0   # cross-entropy: the share of a sample's weight that all classes share
metrics = []            # accuracy | top_5 | auc | log_loss | f1 | calibration | rmse | mae; empty: the usual ones for the loss

[optimizer]
name = "adam"           # sgd | momentum | adagrad | rmsprop | adam | adamw | ftrl
learning_rate = 0.001   # the other optimizers' settings and defaults:
beta1 = 0.9             #   sgd       learning_rate 0.1, weight_decay 0
beta2 = 0.999           #   momentum  learning_rate 0.05, momentum 0.9, nesterov false, weight_decay 0
epsilon = 1e-8          #   adagrad   learning_rate 0.05, initial_accumulator 0, epsilon 1e-10, weight_decay 0
weight_decay = 0.0      #   rmsprop   learning_rate 0.002, alpha 0.99, epsilon 1e-8, momentum 0, weight_decay 0
                        #   adamw     as adam (weight_decay is taken off the weight itself)
                        #   ftrl      learning_rate 0.1, learning_rate_power -0.5, initial_accumulator 0.1,
                        #             l1 0, l2 0, l2_shrinkage 0, beta 0

[schedule]              # the learning rate's factor, by the number of updates a block has taken
kind = "constant"       # constant | step | cosine
warmup_steps = 0        # updates over which the factor first rises to 1
step_every = 1000       # step: updates between two cuts
step_factor = 0.1       # step: what each cut leaves
#: total_steps = 5000   # cosine: updates at which the floor is reached; absent: at the job's end
floor = 0.0             # cosine: the factor at the end

# Variables with settings of their own, by their names; the first group that matches one counts.
#: [[groups]]
#: variables = "*.bias"  # a pattern: * stands for any text
#: frozen = false        # true: keeps its initial values
#: learning_rate = 0.01
#: weight_decay = 0.0
#: optimizer = { name = "sgd" } # absent: the job's

# Embedding tables with settings of their own, by their names; the first entry that matches one counts (docs/tables.md).
#: [[tables]]
#: tables = "*"          # a pattern of names
#: optimizer = { name = "row-adagrad", learning_rate = 0.05 } # sgd | adagrad | row-adagrad | adam | row-adam | ftrl
#: initializer = { uniform = { limit = 0.05 } } # "zeros" | uniform | { normal = { deviation = 0.01 } }
#: buckets = 64          # parts in which a table is spread over servers
#: admission = { sights = { count = 2, width = 65536 } } # "all" | sights | { chance = { probability = 0.1 } }
#: eviction = { age = { updates = 100000 } } # or capacity = { rows = 1000000, order = "oldest" }, below = 1e-6

[strategy]
name = "parameter-server" # parameter-server | multi-worker-mirrored | hybrid | mirrored | central-storage | one-device
                        # | model-parallel (docs/strategies.md)
mode = "bounded"        # sync | bounded | async; strategies without servers are sync, and need not say it
staleness = 4           # bounded: steps that a worker may lead the slowest by
pipeline = 0            # bounded, async: 1: the next step is computed while the gradients of this one travel (docs/strategies.md)
#: correction = { step_limit = 0.1, look_ahead = true, average = 0.5 } # bounded, async: what servers do about gradients of old
#:                      # weights (docs/strategies.md); absent: with a limit of 0.05
wire = "f32"            # f32 | bf16 | f16: numbers in which weights and gradients travel
batch_norm = "per-replica" # per-replica | synchronised: whose samples batch normalisation takes mean and variance of;
                        # synchronised: of all replicas of the step (mirrored, central-storage, multi-worker-mirrored)
#: optimizer_copies = 2 # workers that have each part of the optimizer's state (docs/strategies.md); absent: all
#: bucket_mebibytes = 25.0 # multi-worker-mirrored, hybrid: gradients leave in parts of this size while the backward pass runs;
#:                         # absent: an eighth of the gradients, at least 0.5 and at most 25
#: cross_device = "host" # host | nccl, where devices add up gradients; absent: with mirrored nccl if it is possible, otherwise host
#: schedule = "1f1b"     # model-parallel: 1f1b | gpipe, the order in which stages compute micro-batches
#: micro_batches = 16    # model-parallel: the parts of a batch that follow each other through the stages; absent: 4 for each device
#: stages = 4            # model-parallel: the stages that the model is cut into; absent: one for each device
#: stage_workers = 2     # model-parallel: the workers that hold the stages of a model together; absent: each holds all stages
#: backup_workers = 1    # workers of a ring that a step does not wait for; absent: each step waits for all

[cluster]
#: ps = 2               # parameter servers; absent: those there when none has joined for 3 s
#: workers = 2          # workers that must be there before training begins; absent: 1
lease_seconds = 10.0    # a process not heard of for so long is taken for dead
stall_seconds = 600.0   # a worker that finishes no step for so long is evicted, a checkpoint that does not grow given up;
                        # a job in which no worker can work for so long fails, and one that waits so long for members to begin

[checkpoint]
enabled = true          # without, the death of a parameter server ends the job
#: location = "s3://bucket/run" # or a folder, seen by the coordinator and all servers; absent: in the run directory
every_seconds = 30.0    # between two checkpoints
#: every_steps = 1000   # or after so many steps, where these come first
keep = 3                # older ones are deleted, unless these build on them
snapshot_mebibytes = 64    # sync mode: what a server may copy, so that steps go on while it is written; then they wait
increments = 8          # checkpoints in a row that have only the changed rows of tables; 0 for none
on_full_disk = "wait"   # training goes on, and checkpoints wait for room; stop: the job ends with an error

# Stop once evaluations no longer improve.
#: [early_stopping]
#: metric = "loss"       # the name of a metric of evaluations
#: goal = "min"          # min | max; absent: by the metric's name
#: patience = 3          # evaluations in a row without an improvement
#: min_delta = 0.0       # the least change that counts as one

# Lower the learning rate once evaluations no longer improve.
#: [plateau]
#: metric = "loss"       # the name of a metric of evaluations
#: goal = "min"          # min | max; absent: by the metric's name
#: factor = 0.1          # the part of the learning rate that remains each time
#: patience = 10         # evaluations in a row without an improvement
#: min_delta = 0.0001    # the least change that counts as one
#: cooldown = 0          # evaluations after a fall that are not counted
#: min_learning_rate = 0.0 # no rate falls below this one

# Keep the weights of the best evaluation as best.safetensors, beside the last ones.
#: [best]
#: metric = "loss"
#: goal = "min"          # min | max; absent: by the metric's name
"##;
