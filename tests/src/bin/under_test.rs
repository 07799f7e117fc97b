//! The program under test: Flambeau's command line with the tests' models.

use std::process::ExitCode;

use flambeau::App;
use tests::models::{Chain, Deep, Factors, Joint, Normal, NormalFactors, Odd, RowVisits, Visits};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    App::new()
        .model::<Factors>("factors")
        .model::<Joint>("joint")
        .model::<Normal>("normal")
        .model::<NormalFactors>("normal-factors")
        .model::<Odd>("odd")
        .model::<Chain>("chain")
        .model::<Deep>("deep")
        .model::<RowVisits>("row-visits")
        .model::<Visits>("visits")
        .main()
}
