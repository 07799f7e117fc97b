//! `flambeau devices`: the devices of this machine that workers can compute on.

use clap::Args;
use comfy_table::{Table, presets};
use daemon::{out, outln};
use replica::device::{Found, Gpu, Gpus, find};
use serde_json::{Value, json};

use crate::status::harmless;

/// The advice for a program that was built without CUDA.
const BUILD: &str = "cargo build --release --locked -p flambeau --features cuda (docs/cuda.md)";

#[derive(Args)]
pub(crate) struct Arguments {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) {
    let found = find();
    if arguments.json {
        outln!("{}", json(&found));
    } else {
        out!("{}", text(&found));
    }
}

/// Returns the devices as one JSON object.
fn json(found: &Found) -> Value {
    let cpu = json!({
        "device": "cpu",
        "cores": found.cpu.cores,
        "threads": found.cpu.threads,
        "memory_bytes": found.cpu.memory_bytes,
    });
    let gpus = listed(&found.gpus).iter().map(gpu_json);
    json!({
        "devices": std::iter::once(cpu).chain(gpus).collect::<Vec<_>>(),
        "built_with_cuda": !matches!(found.gpus, Gpus::NotBuilt { .. }),
        "problem": problem(&found.gpus),
    })
}

fn gpu_json(gpu: &Gpu) -> Value {
    match &gpu.state {
        Ok(state) => json!({
            "device": gpu.device,
            "name": state.name,
            "memory_bytes": state.memory_bytes,
            "free_bytes": state.free_bytes,
            "compute_capability": state.compute_capability,
        }),
        Err(reason) => json!({ "device": gpu.device, "problem": reason }),
    }
}

fn listed(gpus: &Gpus) -> &[Gpu] {
    match gpus {
        Gpus::Listed(gpus) => gpus,
        _ => &[],
    }
}

/// Describes why no GPU can be used; `None` if one is listed.
fn problem(gpus: &Gpus) -> Option<String> {
    match gpus {
        Gpus::NotBuilt { present: 0 } => Some(format!(
            "this program is built without CUDA; to compute on NVIDIA GPUs: {BUILD}"
        )),
        Gpus::NotBuilt { present } => Some(format!(
            "this machine's driver knows {present} NVIDIA GPUs, but this program is built without CUDA; to use them: {BUILD}"
        )),
        Gpus::Unusable(reason) => Some(format!(
            "the driver of NVIDIA GPUs does not answer: {reason}; `nvidia-smi` shows whether it is installed"
        )),
        Gpus::Listed(gpus) if gpus.is_empty() => Some(
            "the driver shows no GPU; CUDA_VISIBLE_DEVICES may hide those that there are"
                .to_owned(),
        ),
        _ => None,
    }
}

/// Returns the devices as a table. If no GPU is listed, a line gives the reason.
fn text(found: &Found) -> String {
    let mut table = Table::new();
    let header = ["device", "what it is", "memory", "free"];
    table.load_preset(presets::NOTHING).set_header(header);
    let cpu = &found.cpu;
    table.add_row([
        "cpu".to_owned(),
        format!("{} cores, {} compute threads", cpu.cores, cpu.threads),
        gibibytes(cpu.memory_bytes),
        String::new(),
    ]);
    for gpu in listed(&found.gpus) {
        table.add_row(match &gpu.state {
            Ok(state) => [
                gpu.device.clone(),
                format!(
                    "{}, compute capability {}",
                    harmless(&state.name),
                    state.compute_capability
                ),
                gibibytes(state.memory_bytes),
                gibibytes(state.free_bytes),
            ],
            Err(reason) => [
                gpu.device.clone(),
                format!("cannot be used: {}", harmless(reason)),
                String::new(),
                String::new(),
            ],
        });
    }
    let problem = problem(&found.gpus).map_or_else(String::new, |problem| problem + "\n");
    format!("{}\n{problem}", table.trim_fmt())
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_listed_with_its_threads_and_the_way_to_gpus() {
        let found = find();
        let (text, json) = (text(&found), json(&found));
        let row = text.lines().find(|line| line.contains("cpu")).unwrap();
        assert!(row.contains(&format!("{} compute threads", found.cpu.threads)));
        assert_eq!(json["devices"][0]["cores"], found.cpu.cores);
        assert_eq!(json["built_with_cuda"], cfg!(feature = "cuda"));
        if !cfg!(feature = "cuda") {
            assert!(text.contains("--features cuda"), "{text}");
            assert!(json["problem"].as_str().unwrap().contains("docs/cuda.md"));
        }
    }

    #[test]
    fn gpus_of_a_program_without_cuda_are_not_passed_over() {
        let said = problem(&Gpus::NotBuilt { present: 2 }).unwrap();
        assert!(said.contains("knows 2 NVIDIA GPUs") && said.contains("--features cuda"));
        let silent = problem(&Gpus::Unusable("no answer".to_owned())).unwrap();
        assert!(silent.contains("no answer") && silent.contains("nvidia-smi"));
    }
}
