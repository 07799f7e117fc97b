//! Files that are damaged between two starts. The next start fails with an error that names the file and the way on, or has all that was
//! confirmed.

use std::path::{Path, PathBuf};

use rand::Rng;
use rand_chacha::ChaCha8Rng;

mod older;
mod queue;
mod run;
mod state;

/// Returns the number of random damages of a test: `few`, unless `FLAMBEAU_TEST_DAMAGES` gives another number.
fn damages(few: u64) -> u64 {
    let damages = std::env::var("FLAMBEAU_TEST_DAMAGES");
    damages.map_or(few, |damages| damages.parse().unwrap())
}

/// The content of files; a file that is missing has none.
type Contents = Vec<(PathBuf, Option<Vec<u8>>)>;

fn contents(paths: &[PathBuf]) -> Contents {
    let content = |path: &PathBuf| (path.clone(), std::fs::read(path).ok());
    paths.iter().map(content).collect()
}

fn put_back(contents: &Contents) {
    for (path, content) in contents {
        match content {
            Some(content) => std::fs::write(path, content).unwrap(),
            None => {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Damages a file. Returns the damage in words.
fn damage(path: &Path, older: Option<&[u8]>, rng: &mut ChaCha8Rng) -> String {
    let mut content = std::fs::read(path).unwrap();
    // The rest is room for later changes.
    let used = content.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
    assert!(
        !content.is_empty(),
        "{} has no content to damage",
        path.display()
    );
    let at = rng.random_range(0..used);
    let end = (at + 512).min(used);
    let what = match rng.random_range(0..7) {
        0 | 1 => {
            content[at] ^= 1 << rng.random_range(0..8);
            format!("a bit of byte {at} is flipped")
        }
        2 => {
            content.truncate(at);
            format!("cut to {at} bytes")
        }
        3 => {
            let block = content[at..end].to_vec();
            content.splice(at..at, block);
            format!("a block at {at} is doubled")
        }
        4 => {
            content.drain(at..end);
            format!("a block at {at} is missing")
        }
        5 => {
            std::fs::remove_file(path).unwrap();
            return format!("{}: deleted", path.display());
        }
        _ => match older {
            Some(older) => {
                content = older.to_vec();
                "replaced by an older copy".to_owned()
            }
            None => {
                content[at..end].fill(0);
                format!("a block at {at} is zero")
            }
        },
    };
    std::fs::write(path, content).unwrap();
    format!("{}: {what}", path.display())
}
