//! Makes the wire types from `proto/` with a compiler written in Rust: no protoc to install.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::path::PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let files = ["coordinator", "parameter_server", "collective", "lookup"]
        .map(|f| format!("flambeau/v1/{f}.proto"));
    let descriptors = protox::compile(files, [&root])?;
    tonic_prost_build::configure()
        // Connections are made by the crate `network`.
        .build_transport(false)
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
