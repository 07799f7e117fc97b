//! The book for authors of models, `docs/book`: its commands are run, its jobs are read, its links lead somewhere. The documentation
//! tests of `tests/src/documents.rs` compile and run its programs.
//!
//! An HTML comment in the line before a block says how the block is tested:
//!
//! - `<!-- file: NAME -->`: the block is the content of a file that later commands use; `<!-- broken file: NAME -->` if it is no job
//! - `<!-- fails -->`: the commands fail with the message in the next block of text
//! - `<!-- Cargo.toml -->`: the block is a part of a package's manifest, and no job
//!
//! A command that ends with `&` goes on beside the later ones of its chapter. If it has ended by the end of the chapter, it has ended well.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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

/// Returns the command of a line.
fn command(line: &str, place: &str) -> Command {
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    // A variable stands before the program, as in `NAME='value' program`.
    let variable = words[0]
        .split_once("='")
        .filter(|(name, _)| name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'));
    let variable =
        variable.map(|(name, value)| (name.to_owned(), value.trim_end_matches('\'').to_owned()));
    if variable.is_some() {
        words.remove(0);
    }
    let (program, arguments) = program_of(&words, line, place);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = program.command(&arguments);
    command.envs(variable);
    command
}

/// Returns the program of a command's words, and its arguments.
fn program_of(words: &[String], line: &str, place: &str) -> (Program, Vec<String>) {
    let example = |name: &str| match name {
        "own_data" => env!("CARGO_BIN_EXE_own-data"),
        "own_model" => env!("CARGO_BIN_EXE_own-model"),
        "gan" => env!("CARGO_BIN_EXE_gan"),
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
    lines
        .map(str::trim)
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
        let mut beside = Beside::default();
        for (number, block) in blocks.iter().enumerate() {
            let place = &block.place;
            let mark = block.mark.strip_prefix("broken ").unwrap_or(block.mark);
            if let Some(name) = mark.strip_prefix("file: ") {
                std::fs::write(folder.path().join(name), &block.text).unwrap();
            }
            if block.language != "sh" {
                continue;
            }
            let fails = match block.mark {
                "fails" => true,
                "" => false,
                mark => panic!("{place}: the mark {mark:?} means nothing"),
            };
            for line in lines(block) {
                if let Some(line) = line.strip_suffix('&') {
                    let mut command = command(line, place);
                    beside.start(command.current_dir(folder.path()), line);
                    run += 1;
                    continue;
                }
                let mut command = command(&line, place);
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
        beside.end(&chapter);
    }
    assert!(run > 20, "only {run} commands");
}

/// The commands of a chapter that go on beside others. They are killed when this is dropped.
#[derive(Default)]
struct Beside(Vec<(String, Child)>);

impl Beside {
    fn start(&mut self, command: &mut Command, line: &str) {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.0.push((line.to_owned(), child.spawn().unwrap()));
    }

    /// Gives commands that end by themselves the time to do so, and checks that those that have ended have ended well.
    fn end(&mut self, chapter: &str) {
        let deadline = Instant::now() + Duration::from_secs(if self.0.is_empty() { 0 } else { 5 });
        let runs = |(_, child): &mut (String, Child)| child.try_wait().unwrap().is_none();
        while Instant::now() < deadline && self.0.iter_mut().any(runs) {
            std::thread::sleep(Duration::from_millis(50));
        }
        for (line, child) in &mut self.0 {
            let ended = child.try_wait().unwrap();
            assert!(
                ended.is_none_or(|status| status.success()),
                "{chapter}: {line}: {ended:?}"
            );
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        for (_, child) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
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
