//! The live page and the report in a headless browser: their program runs without errors, and shows what it is given.

use std::path::PathBuf;
use std::process::Command;

use tests::{Cluster, eventually, runs_slow_tests};

use super::program;

/// A desk, and about the smallest window that browsers open.
const WINDOWS: [&str; 2] = ["1280,900", "500,900"];

/// Returns a browser of the Chromium family. If there is none, prints that the test is skipped.
fn browser() -> Option<PathBuf> {
    if !runs_slow_tests("the live page and the report in a browser") {
        return None;
    }
    let given = std::env::var_os("FLAMBEAU_TEST_BROWSER").map(PathBuf::from);
    let usual = ["chromium", "chromium-browser", "google-chrome"].map(PathBuf::from);
    let mut candidates = given.into_iter().chain(usual);
    let works = |program: &PathBuf| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let found = candidates.find(works);
    if found.is_none() {
        tests::say(
            "SKIPPED: the live page and the report are NOT opened in a browser: there is no chromium. Install it, or put \
             its path into FLAMBEAU_TEST_BROWSER",
        );
    }
    found
}

/// Opens a page, and returns its elements after some seconds. The console must have no errors.
fn open(browser: &PathBuf, address: &str, window: &str) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu"])
        .args(["--enable-logging=stderr", "--virtual-time-budget=5000"])
        .arg(format!("--window-size={window}"))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(["--dump-dom", address])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let console = said.lines().filter(|line| line.contains("CONSOLE"));
    assert_eq!(console.collect::<Vec<_>>(), Vec::<&str>::new());
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the number of curves that have at least two points.
fn curves(page: &str) -> usize {
    let paths = page.split("<path d=\"M").skip(1);
    let lines = paths.filter(|path| path.split('"').next().is_some_and(|d| d.contains('L')));
    lines.count()
}

#[test]
fn a_browser_shows_a_job_that_trains() {
    let Some(browser) = browser() else { return };
    let job = "epochs = 100000\n[cluster]\nps = 1\nworkers = 2\n";
    let mut cluster =
        Cluster::start_coordinator_with(program(), job, 1, &["--http", "127.0.0.1:0"]);
    cluster.add_worker(&[]);
    cluster.add_worker(&[]);
    eventually(|| cluster.status()["evaluations"].as_array().unwrap().len() > 2);
    let address = format!("http://{}/", cluster.coordinator.ready.page.unwrap());
    for window in WINDOWS {
        let page = open(&browser, &address, window);
        let shown = [
            ">training</span>",
            ">worker-0</td>",
            ">worker-1</td>",
            ">ps-0</td>",
            ">test accuracy</span>",
            ">worker-1 joined</td>",
            "epochs = 100000",
        ];
        for part in shown {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        // Losses of training and test, accuracy, and samples/s.
        assert_eq!(curves(&page), 4, "{page}");
    }
}

#[test]
fn a_browser_asks_for_the_token() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "a-token-of-thirty-two-characters-\n").unwrap();
    let more = [
        "--http",
        "127.0.0.1:0",
        "--token-file",
        token.to_str().unwrap(),
    ];
    let cluster = Cluster::start_coordinator_with(program(), "epochs = 1\n", 0, &more);
    let address = format!("http://{}/", cluster.coordinator.ready.page.unwrap());
    let asks = "<form id=\"ask\" class=\"card\">";
    let page = open(&browser, &address, WINDOWS[0]);
    assert!(page.contains(asks), "{page}");
    let given = format!("{address}#token=a-token-of-thirty-two-characters-");
    let page = open(&browser, &given, WINDOWS[0]);
    assert!(
        !page.contains(asks) && page.contains(">starting</span>"),
        "{page}"
    );
}

#[test]
fn a_browser_shows_the_report_of_a_run() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut command = program().command(&["train", "--quiet", "--epochs", "3", "--run-dir"]);
    let output = command.arg(&run).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let address = format!("file://{}", run.join("report.html").display());
    for window in WINDOWS {
        let page = open(&browser, &address, window);
        for part in [">done</span>", ">2 servers, 2 workers</td>", "epochs = 3"] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        assert_eq!(curves(&page), 4, "{page}");
    }
}
