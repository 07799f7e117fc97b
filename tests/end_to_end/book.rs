//! The book for authors of models, `docs/book`: its commands are run, its jobs are read, its links lead somewhere. The documentation
//! tests of `tests/src/documents.rs` compile and run its programs.
//!
//! An HTML comment in the line before a block says how the block is tested:
//!
//! - `<!-- file: NAME -->`: the block is the content of a file that later commands use; `<!-- broken file: NAME -->` if it is no job
//! - `<!-- fails -->`: the commands fail with the message in the next block of text
//! - `<!-- not run: REASON -->`: the commands cannot run in a test; their flags are checked
//! - `<!-- Cargo.toml -->`: the block is a part of a package's manifest, and no job

use std::fmt::Write;
use std::path::{Path, PathBuf};

use flambeau::Job;
use tests::Program;

use crate::program;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn book() -> PathBuf {
    root().join("docs/book/src")
}

/// Returns the names and the texts of the chapters.
fn chapters() -> Vec<(String, String)> {
    let mut chapters: Vec<_> = std::fs::read_dir(book())
        .unwrap()
        .map(|file| file.unwrap().path())
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(&path).unwrap())
        })
        .filter(|(name, _)| name != "SUMMARY.md")
        .collect();
    chapters.sort();
    assert!(chapters.len() >= 12);
    chapters
}

/// A fenced block of a chapter.
struct Block<'a> {
    /// Its chapter and line.
    place: String,
    language: &'a str,
    /// The comment before it.
    mark: &'a str,
    text: String,
}

fn blocks<'a>(chapter: &str, text: &'a str) -> Vec<Block<'a>> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    let mut before = "";
    while let Some((number, line)) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let inside: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .collect();
            let mark = before.strip_prefix("<!-- ");
            blocks.push(Block {
                place: format!("{chapter}, line {}", number + 1),
                language,
                mark: mark.and_then(|m| m.strip_suffix(" -->")).unwrap_or(""),
                text: inside.join("\n") + "\n",
            });
        }
        before = line;
    }
    blocks
}

/// Returns the program of a command and its arguments.
fn command(line: &str, place: &str) -> (Program, Vec<String>) {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let example = |name: &str| match name {
        "own_data" => env!("CARGO_BIN_EXE_own-data"),
        "own_model" => env!("CARGO_BIN_EXE_own-model"),
        _ => panic!("{place}: there is no test program for the example {name}"),
    };
    match words
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["flambeau", ..] => (program(), words[1..].to_vec()),
        ["cargo", "run", "--release", "--example", name, "--", ..] => {
            (Program(example(name).into()), words[6..].to_vec())
        }
        _ => panic!("{place}: {line:?} is no command that this test knows; see its first lines"),
    }
}

/// Returns the command lines of a block, without comments.
fn lines(block: &Block) -> Vec<String> {
    let text = block.text.replace("\\\n", " ");
    let lines = text.lines().map(|line| line.split(" #").next().unwrap());
    let lines = lines.map(|line| line.trim().trim_end_matches('&').trim());
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// Makes the files that commands of the book use.
fn prepare(folder: &Path) {
    std::os::unix::fs::symlink(root().join("examples"), folder.join("examples")).unwrap();
    let mut houses = "price,area,city\n".to_owned();
    for i in 0..200 {
        let (area, city) = (40 + i * 7 % 90, ["Lyon", "Nantes", "Lille"][i % 3]);
        writeln!(houses, "{},{area},{city}", area * 3 + i % 3 * 20).unwrap();
    }
    std::fs::create_dir(folder.join("houses")).unwrap();
    std::fs::write(folder.join("houses/train.csv"), houses).unwrap();
    let offered = "price,area,city\n0,50,Lyon\n0,90,Nantes\n0,70,Brest\n";
    std::fs::write(folder.join("offered.csv"), offered).unwrap();
}

#[test]
fn each_command_of_the_book_does_what_the_book_says() {
    let mut run = 0;
    for (chapter, text) in chapters() {
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let blocks = blocks(&chapter, &text);
        for (number, block) in blocks.iter().enumerate() {
            let place = &block.place;
            let mark = block.mark.strip_prefix("broken ").unwrap_or(block.mark);
            if let Some(name) = mark.strip_prefix("file: ") {
                std::fs::write(folder.path().join(name), &block.text).unwrap();
            }
            if block.language != "sh" {
                continue;
            }
            if let Some(reason) = block.mark.strip_prefix("not run:") {
                assert!(reason.trim().len() > 10, "{place}: give a reason");
                check_flags(block);
                continue;
            }
            let fails = match block.mark {
                "fails" => true,
                "" => false,
                mark => panic!("{place}: the mark {mark:?} means nothing"),
            };
            for line in lines(block) {
                let (program, arguments) = command(&line, place);
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                let mut command = program.command(&arguments);
                let output = command.current_dir(folder.path()).output().unwrap();
                let log = String::from_utf8_lossy(&output.stderr);
                assert_ne!(output.status.success(), fails, "{place}: {line}: {log}");
                if fails {
                    let message = blocks[number + 1..].iter().find(|b| b.language == "text");
                    let message = message.unwrap_or_else(|| panic!("{place}: no message follows"));
                    assert!(log.contains(message.text.trim()), "{place}: {line}: {log}");
                }
                run += 1;
            }
        }
    }
    assert!(run > 20, "only {run} commands");
}

/// Checks the flags of commands that cannot run in a test.
fn check_flags(block: &Block) {
    for line in lines(block) {
        if line.starts_with("flambeau ") {
            let (program, mut arguments) = command(&line, &block.place);
            arguments.push("--help".to_owned());
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let output = program.run(&arguments);
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {line}: {log}", block.place);
        }
    }
}

#[test]
fn each_job_of_the_book_is_one() {
    let mut read = 0;
    for (chapter, text) in chapters() {
        for block in blocks(&chapter, &text) {
            let is_job = block.mark != "Cargo.toml" && !block.mark.starts_with("broken");
            if block.language == "toml" && is_job {
                let job = Job::from_toml(&block.text);
                assert!(job.is_ok(), "{}: {}", block.place, job.unwrap_err());
                read += 1;
            }
        }
    }
    assert!(read > 5, "only {read} jobs");
}

#[test]
fn each_chapter_is_in_the_summary_and_each_link_leads_to_a_file() {
    let summary = std::fs::read_to_string(book().join("SUMMARY.md")).unwrap();
    let chapters = chapters();
    for (chapter, _) in &chapters {
        assert!(summary.contains(&format!("({chapter})")), "{chapter}");
    }
    let anchors = |text: &str| -> Vec<String> {
        let headings = text.lines().filter(|line| line.starts_with('#'));
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let anchor = |line: &str| -> String {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title.chars().filter(kept).collect()
        };
        headings
            .map(|line| anchor(line).replace(' ', "-"))
            .collect()
    };
    for (chapter, text) in chapters
        .iter()
        .map(|(name, text)| (name.as_str(), text))
        .chain([("SUMMARY.md", &summary)])
    {
        for link in text.split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            if link.starts_with("http") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = book().join(if file.is_empty() { chapter } else { file });
            assert!(path.exists(), "{chapter}: {link}");
            if !anchor.is_empty() {
                let target = std::fs::read_to_string(&path).unwrap();
                let found = anchors(&target).iter().any(|a| a == anchor);
                assert!(found, "{chapter}: {link}");
            }
        }
    }
}
