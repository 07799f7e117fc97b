//! What a log promises: changes that were confirmed are read back, or the log is refused.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Room for a few changes of [`change`].
const ROOM: usize = 2048;

const PATH: &str = "log";

fn change(number: u64) -> RowChanges {
    RowChanges {
        set: vec![
            (format!("row {}", number % 7), vec![number as u8; 60]),
            ("newest".to_owned(), number.to_le_bytes().to_vec()),
        ],
        removed: vec![format!("row {}", (number + 3) % 7)],
    }
}

/// Returns the rows after so many changes.
fn rows_after(changes: u64) -> Rows {
    let mut rows = Rows::new();
    (1..=changes).for_each(|number| change(number).apply_to(&mut rows));
    rows
}

/// Files in memory, for tests.
#[derive(Debug, Default)]
pub(crate) struct InMemory([Mutex<Vec<u8>>; 3]);

impl Storage for InMemory {
    fn read(&self, file: LogFile) -> io::Result<Vec<u8>> {
        Ok(self.0[file as usize].lock().clone())
    }

    fn write(&self, file: LogFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut content = self.0[file as usize].lock();
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let end = start + bytes.len();
        if content.len() < end {
            content.resize(end, 0);
        }
        content[start..end].copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, file: LogFile, length: u64) -> io::Result<()> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        self.0[file as usize].lock().resize(length, 0);
        Ok(())
    }

    fn sync(&self, _file: LogFile) -> io::Result<()> {
        Ok(())
    }
}

/// Files that outlive the log over them.
#[derive(Clone, Debug, Default)]
struct Disk {
    files: Arc<InMemory>,
    /// The number of changes of files that succeed. All fail after them; each but the first of those that fail changes nothing.
    left: Arc<AtomicUsize>,
}

impl Disk {
    fn new() -> Self {
        let disk = Self::default();
        disk.left.store(usize::MAX, Ordering::Relaxed);
        disk
    }

    fn open(&self) -> Result<Log, StateError> {
        Log::over(Box::new(self.clone()), Path::new(PATH), ROOM)
    }

    /// Returns the contents of all files.
    fn contents(&self) -> [Vec<u8>; 3] {
        LogFile::ALL.map(|file| self.files.read(file).unwrap())
    }

    fn set(&self, file: LogFile, content: &[u8]) {
        self.files.set_len(file, 0).unwrap();
        self.files.write(file, 0, content).unwrap();
    }

    fn takes(&self) -> io::Result<()> {
        let left = self.left.load(Ordering::Relaxed);
        let left = left.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
        self.left.store(left, Ordering::Relaxed);
        Ok(())
    }
}

impl Storage for Disk {
    fn read(&self, file: LogFile) -> io::Result<Vec<u8>> {
        self.files.read(file)
    }

    fn write(&self, file: LogFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let was_last = self.left.load(Ordering::Relaxed) == 1;
        self.takes()?;
        if was_last {
            // The process dies within the write.
            self.files.write(file, offset, &bytes[..bytes.len() / 2])?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.files.write(file, offset, bytes)
    }

    fn set_len(&self, file: LogFile, length: u64) -> io::Result<()> {
        self.takes()?;
        self.files.set_len(file, length)
    }

    fn sync(&self, file: LogFile) -> io::Result<()> {
        self.takes()?;
        self.files.sync(file)
    }
}

/// Writes changes by several processes. Returns the disk, with the contents after each change.
fn written(changes: u64) -> (Disk, Vec<[Vec<u8>; 3]>) {
    let disk = Disk::new();
    let mut log = disk.open().unwrap();
    let mut after = Vec::new();
    for number in 1..=changes {
        if number % 40 == 0 {
            log = disk.open().unwrap();
        }
        log.write(change(number)).unwrap();
        after.push(disk.contents());
    }
    (disk, after)
}

/// Damages one file in a random way. Returns what was done.
fn damage(files: &mut [Vec<u8>; 3], earlier: &[[Vec<u8>; 3]], rng: &mut ChaCha8Rng) -> String {
    let file = rng.random_range(0..3);
    let content = &mut files[file];
    let length = content.len();
    // Most of the room is empty, and damage of it is harmless.
    let used = content.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
    let at = rng.random_range(0..used);
    let block = rng.random_range(1..=used.min(600));
    let from = rng.random_range(0..=used - block);
    let what = match rng.random_range(0..8) {
        0 | 1 => {
            let bit = rng.random_range(0..8);
            content[at] ^= 1 << bit;
            format!("bit {bit} of byte {at} flipped")
        }
        2 => {
            content[at] = content[at].wrapping_add(rng.random_range(1..=255));
            format!("byte {at} changed")
        }
        3 => {
            content.truncate(at);
            format!("cut to {at} bytes")
        }
        4 => {
            let copy = content[from..from + block].to_vec();
            content.splice(from..from, copy);
            format!("{block} bytes at {from} doubled")
        }
        5 => {
            content.drain(from..from + block);
            format!("{block} bytes at {from} missing")
        }
        6 => {
            let to = rng.random_range(0..=used - block);
            content.copy_within(from..from + block, to);
            format!("{block} bytes copied from {from} to {to}")
        }
        _ => {
            let copy = rng.random_range(0..earlier.len());
            content.clone_from(&earlier[copy][file]);
            format!("replaced by its copy after change {}", copy + 1)
        }
    };
    format!("file {file} of {length} bytes: {what}")
}

#[test]
fn a_damaged_log_is_refused_or_has_all_confirmed_changes() {
    let mut rng = ChaCha8Rng::seed_from_u64(53);
    let (mut refused, mut harmless) = (0, 0);
    for round in 0..40 {
        let changes = rng.random_range(1..120);
        let (disk, after) = written(changes);
        let whole = disk.contents();
        for trial in 0..50 {
            let mut files = whole.clone();
            let what = damage(&mut files, &after, &mut rng);
            for (file, content) in LogFile::ALL.into_iter().zip(&files) {
                disk.set(file, content);
            }
            match disk.open() {
                Ok(log) => {
                    harmless += 1;
                    let same = log.rows == rows_after(changes);
                    assert!(
                        same,
                        "round {round}, trial {trial}, {changes} changes, {what}"
                    );
                    // It goes on from there.
                    let mut log = log;
                    log.write(change(changes + 1)).unwrap();
                    assert_eq!(disk.open().unwrap().rows, rows_after(changes + 1), "{what}");
                }
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains(PATH), "{error}");
                    assert_eq!(disk.contents(), files, "{what}");
                }
            }
        }
    }
    assert!(refused > 300 && harmless > 200, "{refused} {harmless}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// A process dies within any change of a file: what it had confirmed is there, and perhaps the change that it was about to make.
    #[test]
    fn a_process_that_dies_at_any_point_loses_nothing(
        deaths in prop::collection::vec(0usize..60, 1..8),
    ) {
        let disk = Disk::new();
        let mut confirmed = 0;
        for death in deaths {
            let mut log = disk.open().unwrap();
            disk.left.store(death, Ordering::Relaxed);
            while log.write(change(confirmed + 1)).is_ok() {
                confirmed += 1;
            }
            prop_assert_eq!(&log.rows, &rows_after(confirmed));
            disk.left.store(usize::MAX, Ordering::Relaxed);
            let found = disk.open().unwrap().rows;
            let next = found == rows_after(confirmed + 1);
            prop_assert!(next || found == rows_after(confirmed));
            confirmed += u64::from(next);
        }
    }
}

#[test]
fn a_change_that_fails_is_not_made_and_does_not_come_back_after_a_later_one() {
    for fails_after in 0..12 {
        let disk = Disk::new();
        let mut log = disk.open().unwrap();
        log.write(change(1)).unwrap();
        disk.left.store(fails_after, Ordering::Relaxed);
        let large = RowChanges {
            set: vec![("large".to_owned(), vec![1; ROOM])],
            removed: Vec::new(),
        };
        let made = log.write(large).is_ok();
        disk.left.store(usize::MAX, Ordering::Relaxed);
        log.write(change(2)).unwrap();
        let has_large = |rows: &Rows| rows.contains_key("large");
        assert_eq!(has_large(&log.rows), made);
        assert_eq!(disk.open().unwrap().rows, log.rows, "{fails_after}");
    }
}

#[test]
fn a_log_grows_with_its_rows_and_gives_room_back() {
    let disk = Disk::new();
    let mut log = disk.open().unwrap();
    let large = |number: u64| RowChanges {
        set: vec![(format!("large {number}"), vec![number as u8; 3 * ROOM])],
        removed: Vec::new(),
    };
    for number in 1..6 {
        log.write(large(number)).unwrap();
        log.write(change(number)).unwrap();
    }
    let rows = log.rows.clone();
    log.release();
    let used = disk.contents().map(|content| content.len());
    assert!(used.iter().sum::<usize>() < 20 * ROOM, "{used:?}");
    let mut log = disk.open().unwrap();
    assert_eq!(log.rows, rows);
    log.write(change(6)).unwrap();
    assert_eq!(disk.open().unwrap().rows, log.rows);
}

#[test]
fn files_of_another_kind_are_refused_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(PATH);
    for file in LogFile::ALL {
        for content in [b"notes".to_vec(), vec![7; 5 << 20]] {
            let foreign = file.path(&path);
            fs::write(&foreign, &content).unwrap();
            let refusals = [
                Log::open(&path, ROOM).unwrap_err().to_string(),
                Log::find(&path).unwrap_err().to_string(),
            ];
            for refused in refusals {
                assert!(refused.contains("not written by Flambeau"), "{refused}");
            }
            assert_eq!(fs::read(&foreign).unwrap(), content);
            fs::remove_file(&foreign).unwrap();
        }
    }
    fs::write(dir.path().join("log.redb"), "redb").unwrap();
    fs::remove_file(&path).unwrap();
    let refused = Log::open(&path, ROOM).unwrap_err().to_string();
    assert!(refused.contains("an earlier release"), "{refused}");
    assert!(!path.exists());
}

#[test]
fn a_log_belongs_to_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(PATH);
    assert!(Log::find(&path).unwrap().is_none());
    assert!(!path.exists());
    let mut log = Log::open(&path, ROOM).unwrap();
    log.write(change(1)).unwrap();
    for refused in [Log::open(&path, ROOM).err(), Log::find(&path).err()] {
        assert!(matches!(refused, Some(StateError::OpenElsewhere)));
    }
    drop(log);
    assert_eq!(Log::find(&path).unwrap(), Some(rows_after(1)));
}
