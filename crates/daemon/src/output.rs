//! The log and other output, which may have no reader or no room. What cannot be written is lost; the process goes on.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::counter;

/// The number of log lines that could not be written since the last line that could.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Writes the log to stderr. Lines that cannot be written are counted in the metrics, and the next line that can be
/// written is preceded by their number.
#[derive(Debug)]
pub(crate) struct Log<W = io::Stderr>(W);

impl Log {
    pub(crate) fn to_stderr() -> Self {
        Self(io::stderr())
    }
}

impl<W: Write> Write for Log<W> {
    /// Takes a whole line. Counts it as lost if it cannot be written, and returns no error.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = LOST.load(Ordering::Relaxed);
        let written = match lost {
            0 => self.0.write_all(line),
            lost => {
                let told = writeln!(
                    self.0,
                    "{lost} lines of the log could not be written and are lost"
                );
                told.and_then(|()| self.0.write_all(line))
            }
        };
        match written {
            Ok(()) => {
                LOST.fetch_sub(lost, Ordering::Relaxed);
            }
            Err(_) => {
                LOST.fetch_add(1, Ordering::Relaxed);
                counter!("flambeau_log_lines_lost_total").increment(1);
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

/// Prints a result to stdout. If the pipe has no reader any more, as in `flambeau jobs | head`, the process ends
/// without an error. If the result cannot be written for another reason, the process prints the error to stderr and
/// exits with code 1.
pub fn print(result: Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    let printed = stdout.write_fmt(result).and_then(|()| stdout.flush());
    match printed {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            note(format_args!("flambeau: cannot write to stdout: {error}"));
            std::process::exit(1);
        }
    }
}

/// Prints a line for people to stderr, if it can be written.
pub fn note(line: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Prints a result to stdout, as [`output::print`](crate::output::print()) does.
#[macro_export]
macro_rules! out {
    ($($text:tt)*) => {
        $crate::output::print(format_args!($($text)*))
    };
}

/// Prints a result and the end of its line to stdout, as [`output::print`](crate::output::print()) does.
#[macro_export]
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::output::print(format_args!("{}\n", format_args!($($text)*)))
    };
}

/// Prints a line for people to stderr, as [`output::note`](crate::output::note()) does.
#[macro_export]
macro_rules! noteln {
    ($($text:tt)*) => {
        $crate::output::note(format_args!($($text)*))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output that has room for some lines, then none for some time.
    struct Disk {
        written: String,
        room: Vec<bool>,
    }

    impl Write for Disk {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            if !self.room.pop().unwrap_or(true) {
                return Err(ErrorKind::StorageFull.into());
            }
            self.written.push_str(&String::from_utf8_lossy(text));
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(ErrorKind::StorageFull.into())
        }
    }

    #[test]
    fn lost_lines_of_the_log_are_told_once_there_is_room() {
        let room = vec![false, false, true];
        let written = String::new();
        let mut log = Log(Disk { written, room });
        for line in ["a\n", "b\n", "c\n", "d\n", "e\n"] {
            log.write_all(line.as_bytes()).unwrap();
        }
        log.flush().unwrap();
        let written = log.0.written;
        let told = "2 lines of the log could not be written and are lost\n";
        assert_eq!(written.replace(told, "[2]\n"), "a\n[2]\nd\ne\n");
    }
}
