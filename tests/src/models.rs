//! Models that misbehave on purpose, or that show what became of their variables. Environment variables, which differ
//! between workers, choose the faults.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use flambeau::candle_core::{Result, Tensor};
use flambeau::candle_nn::{self, BatchNorm, BatchNormConfig, Linear, Module, VarBuilder};
use flambeau::{Batch, Embeddings, Initializer, Model, Pass, Setup, Table, forward_blocks, nn};

/// A linear model. Its step takes as many milliseconds as `TEST_STEP_MILLISECONDS` says, and 300 while the
/// file that `TEST_SLOW_WHILE` names exists. It computes NaN from step `TEST_NAN_AT` on, and panics at step
/// `TEST_PANIC_AT`. With `TEST_NO_MODEL` it cannot be built, nor by the process with the identity
/// `TEST_NO_MODEL_FOR`. In each step it appends a digest of its weights to a file, named by its process, in the folder
/// `TEST_DIGESTS`.
#[derive(Debug)]
pub struct Odd {
    linear: Linear,
    step: AtomicU64,
}

/// Appends a digest of values to a file of this process.
fn note_digest<'a>(
    values: impl IntoIterator<Item = &'a Tensor>,
    folder: &std::path::Path,
) -> Result<()> {
    use std::io::Write;
    let mut hash = DefaultHasher::new();
    for tensor in values {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        values
            .iter()
            .for_each(|value| value.to_bits().hash(&mut hash));
    }
    let path = folder.join(std::process::id().to_string());
    let mut file = std::fs::File::options()
        .create(true)
        .append(true)
        .open(path)?;
    file.write_all(format!("{:016x}\n", hash.finish()).as_bytes())
        .map_err(Into::into)
}

fn told(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

impl Model for Odd {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let for_whom = std::env::var("TEST_NO_MODEL_FOR");
        let is_meant = for_whom.is_ok_and(|name| std::env::args().any(|a| a == name));
        if told("TEST_NO_MODEL").is_some() || is_meant {
            return Err(flambeau::candle_core::Error::msg("told to be none"));
        }
        let features = setup.features()?;
        Ok(Self {
            linear: candle_nn::linear(features, setup.outputs(), vars.pp("line"))?,
            step: AtomicU64::new(0),
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.linear.forward(&batch.input()?.flatten_from(1)?)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let loss = pass.objective.loss.of(outputs, batch)?;
        let values = [Some(self.linear.weight()), self.linear.bias()];
        misbehave(&self.step, loss, pass, values.into_iter().flatten())
    }
}

/// Takes 300 milliseconds while the file that `TEST_SLOW_WHILE` names exists.
fn slow_down() {
    let slow_while = std::env::var_os("TEST_SLOW_WHILE");
    if slow_while.is_some_and(|file| std::path::Path::new(&file).exists()) {
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Does in a step what the environment says. Returns the loss.
fn misbehave<'a>(
    steps: &AtomicU64,
    loss: Tensor,
    pass: &Pass,
    values: impl Iterator<Item = &'a Tensor>,
) -> Result<Tensor> {
    if !pass.training {
        return Ok(loss);
    }
    let step = steps.fetch_add(1, Ordering::Relaxed);
    if let Some(folder) = std::env::var_os("TEST_DIGESTS") {
        note_digest(values, folder.as_ref())?;
    }
    if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS") {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
    slow_down();
    assert!(
        told("TEST_PANIC_AT") != Some(step),
        "told to panic at step {step}"
    );
    match told("TEST_NAN_AT") {
        Some(at) if step >= at => loss.affine(f64::NAN, 0.0),
        _ => Ok(loss),
    }
}

/// Three layers of this library, which misbehave as [`Odd`] does.
pub struct Deep {
    layers: [nn::Linear; 3],
    values: Vec<Tensor>,
    step: AtomicU64,
}

impl Model for Deep {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let sizes = [setup.features()?, 48, 32, setup.outputs()];
        let mut values = Vec::new();
        let mut layer = |number: usize| {
            let vars = vars.pp(number);
            let (from, to) = (sizes[number], sizes[number + 1]);
            let layer = nn::Linear::new(from, to, vars.clone())?;
            values.push(vars.get((to, from), "weight")?);
            values.push(vars.get(to, "bias")?);
            Ok::<_, flambeau::candle_core::Error>(layer)
        };
        Ok(Self {
            layers: [layer(0)?, layer(1)?, layer(2)?],
            values,
            step: AtomicU64::new(0),
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let [first, second, last] = &self.layers;
        let x = first.forward_relu(&batch.input()?.flatten_from(1)?)?;
        last.forward(&second.forward_relu(&x)?)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let loss = pass.objective.loss.of(outputs, batch)?;
        misbehave(&self.step, loss, pass, self.values.iter())
    }
}

/// A model with weights that count visits. Each sample has a class of its own, and each step on it adds one to that
/// element of each variable. It needs SGD at a learning rate of one, and a batch size of one.
#[derive(Debug)]
pub struct Visits(Vec<Tensor>);

impl Model for Visits {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let zeros = candle_nn::init::ZERO;
        let variable = |name| vars.get_with_hints(setup.outputs(), name, zeros);
        Ok(Self(
            ["a", "b", "c", "d"]
                .map(variable)
                .into_iter()
                .collect::<Result<_>>()?,
        ))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let mut sum = self.0[0].clone();
        for variable in &self.0[1..] {
            sum = (sum + variable)?;
        }
        let classes = sum.elem_count();
        sum.broadcast_as((batch.samples(), classes))
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        visited(outputs, batch, pass)
    }
}

/// A model that counts visits in a dense variable and in rows of a table. Each sample has a class and an id of its own, and each
/// step on it adds one to the element of the class and to the row of the id. It needs what [`Visits`] needs.
#[derive(Debug)]
pub struct RowVisits {
    dense: Tensor,
    rows: Embeddings,
}

impl Model for RowVisits {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let zeros = candle_nn::init::ZERO;
        let table = Table::dim(1)
            .sgd(1.0)
            .initializer(Initializer::Zeros)
            .column("id");
        Ok(Self {
            dense: vars.get_with_hints(setup.outputs(), "dense", zeros)?,
            rows: setup.table("rows", table)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let rows = self.rows.lookup(batch, "id")?;
        rows.broadcast_add(&self.dense)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        visited(outputs, batch, pass)
    }
}

/// A loss that falls by one with each element of a sample's own class.
fn visited(outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
    if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS").filter(|_| pass.training) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
    let classes = outputs.dim(1)? as u32;
    let all = Tensor::arange(0, classes, outputs.device())?;
    let visited = all.broadcast_eq(&batch.target()?.unsqueeze(1)?)?;
    let visited = visited.to_dtype(outputs.dtype())?;
    (outputs * visited)?.sum_all()?.neg()
}

/// A linear model of inputs that candle's batch normalisation has normalised.
#[derive(Debug)]
pub struct Normal {
    norm: BatchNorm,
    line: Linear,
}

impl Model for Normal {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.features()?;
        Ok(Self {
            norm: candle_nn::batch_norm(features, BatchNormConfig::default(), vars.pp("norm"))?,
            line: candle_nn::linear(features, setup.outputs(), vars.pp("line"))?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let inputs = batch.input()?.flatten_from(1)?;
        let inputs = inputs.apply_t(&self.norm, pass.training)?;
        self.line.forward(&inputs)
    }
}

/// A linear model of inputs that Flambeau's batch normalisation has normalised twice. Before each step it appends a digest of its
/// variables to a file, as [`Odd`] does. Between the forward and the backward pass of a step it waits for as many milliseconds as
/// `TEST_STEP_MILLISECONDS` says.
#[derive(Debug)]
pub struct Joint {
    norms: [nn::BatchNorm; 2],
    line: Linear,
    variables: Vec<Tensor>,
}

impl Model for Joint {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let features = setup.features()?;
        let norm =
            |name| nn::BatchNorm::new(features, nn::BatchNormConfig::default(), vars.pp(name));
        let norms = [norm("first")?, norm("second")?];
        let line = candle_nn::linear(features, setup.outputs(), vars.pp("line"))?;
        // A variable that is asked for again is the same one.
        let fields = ["weight", "bias", "running_mean", "running_var"];
        let names = ["first", "second"].into_iter().flat_map(|norm| {
            let named = move |field| format!("{norm}.{field}");
            fields.map(named)
        });
        let variables = names.map(|name| vars.get(features, &name));
        let mut variables = variables.collect::<Result<Vec<_>>>()?;
        variables.push(line.weight().clone());
        Ok(Self {
            norms,
            line,
            variables,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        if let Some(folder) = std::env::var_os("TEST_DIGESTS").filter(|_| pass.training) {
            note_digest(&self.variables, folder.as_ref())?;
        }
        let mut x = batch.input()?.flatten_from(1)?;
        for norm in &self.norms {
            x = norm.forward(&x, pass.training)?;
            x = (&x + x.sqr()?)?;
        }
        if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS").filter(|_| pass.training) {
            std::thread::sleep(Duration::from_millis(milliseconds));
        }
        self.line.forward(&x)
    }
}

/// Factors of users and items, in a table each, and a bias. The output for a sample is the product of its user's and its
/// item's factors. A step takes as many milliseconds as `TEST_STEP_MILLISECONDS` says.
#[derive(Debug)]
pub struct Factors {
    users: Embeddings,
    items: Embeddings,
    bias: Tensor,
}

impl Model for Factors {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let table = |column| Table::dim(4).sgd(0.5).column(column);
        Ok(Self {
            users: setup.table("users", table("user"))?,
            items: setup.table("items", table("item"))?,
            bias: vars.get_with_hints(1, "bias", candle_nn::init::ZERO)?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let users = self.users.lookup(batch, "user")?;
        let items = self.items.lookup(batch, "item")?;
        (users * items)?.sum(1)?.broadcast_add(&self.bias)
    }

    fn loss(&self, outputs: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS").filter(|_| pass.training) {
            std::thread::sleep(Duration::from_millis(milliseconds));
        }
        pass.objective.loss.of(outputs, batch)
    }
}

/// The products of factors of users and items, in a table each, normalised over the samples of a step, in a linear layer.
#[derive(Debug)]
pub struct NormalFactors {
    users: Embeddings,
    items: Embeddings,
    norm: nn::BatchNorm,
    line: Linear,
}

impl Model for NormalFactors {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let table = |column| Table::dim(4).sgd(0.01).column(column);
        let config = nn::BatchNormConfig::default();
        Ok(Self {
            users: setup.table("users", table("user"))?,
            items: setup.table("items", table("item"))?,
            norm: nn::BatchNorm::new(4, config, vars.pp("norm"))?,
            line: candle_nn::linear(4, 1, vars.pp("line"))?,
        })
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let users = self.users.lookup(batch, "user")?;
        let products = (users * self.items.lookup(batch, "item")?)?;
        let products = self.norm.forward(&products, pass.training)?;
        self.line.forward(&products)?.squeeze(1)
    }
}

/// A chain of four layers, each a block. The first one takes as many milliseconds for a micro-batch as `TEST_STEP_MILLISECONDS` says, and
/// 300 while the file that `TEST_SLOW_WHILE` names exists.
#[derive(Debug)]
pub struct Chain([Linear; 4]);

impl Model for Chain {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let (inputs, outputs) = (setup.features()?, setup.outputs());
        let layer = |block: usize, from, to| {
            let vars = setup.block(block, 4, &vars)?;
            candle_nn::linear(from, to, vars.pp(block))
        };
        Ok(Self([
            layer(0, inputs, 24)?,
            layer(1, 24, 16)?,
            layer(2, 16, 12)?,
            layer(3, 12, outputs)?,
        ]))
    }

    fn forward(&self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        forward_blocks(self, batch, pass)
    }

    fn blocks(&self) -> usize {
        self.0.len()
    }

    fn forward_block(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let Some(x) = x else {
            if let Some(milliseconds) = told("TEST_STEP_MILLISECONDS").filter(|_| pass.training) {
                std::thread::sleep(Duration::from_millis(milliseconds));
            }
            slow_down();
            return self.0[block].forward(&batch.input()?.flatten_from(1)?);
        };
        self.0[block].forward(&x.relu()?)
    }
}
