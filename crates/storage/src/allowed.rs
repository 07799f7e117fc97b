//! The places that a submitted job may use.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use crate::{Location, StorageError};

/// Folders and parts of buckets, with all that is below them.
#[derive(Clone, Debug, Default)]
pub struct AllowedLocations {
    places: Vec<Location>,
    any: bool,
}

/// The text that stands for all places. A folder of this name is `./any`.
const ANY: &str = "any";

impl AllowedLocations {
    /// Reads the places; `any` stands for all. Empty texts are skipped.
    ///
    /// # Errors
    /// [`StorageError::Location`].
    pub fn read<'a>(places: impl IntoIterator<Item = &'a str>) -> Result<Self, StorageError> {
        let mut allowed = Self::default();
        for place in places.into_iter().filter(|place| !place.is_empty()) {
            match place {
                ANY => allowed.any = true,
                place => allowed.places.push(real(Location::parse(place)?)),
            }
        }
        Ok(allowed)
    }

    /// Allows one more place. Here `any` is the name of a folder.
    ///
    /// # Errors
    /// [`StorageError::Location`].
    pub fn and(mut self, place: &str) -> Result<Self, StorageError> {
        self.places.push(real(Location::parse(place)?));
        Ok(self)
    }

    /// Returns whether a location lies in one of these places. Links and `..` are followed first, so that they cannot
    /// lead out of a place.
    ///
    /// # Errors
    /// [`StorageError::Location`].
    pub fn have(&self, location: &str) -> Result<bool, StorageError> {
        let location = real(Location::parse(location)?);
        Ok(self.any || self.places.iter().any(|place| is_below(&location, place)))
    }
}

impl fmt::Display for AllowedLocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |place: &Location| match place {
            Location::Folder(folder) => folder.display().to_string(),
            Location::Bucket { name, path } => format!("s3://{name}/{path}"),
        };
        let names: Vec<String> = self.places.iter().map(name).collect();
        match names.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&names.join(", ")),
        }
    }
}

fn is_below(location: &Location, place: &Location) -> bool {
    match (location, place) {
        (Location::Folder(folder), Location::Folder(place)) => folder.starts_with(place),
        (
            Location::Bucket { name, path },
            Location::Bucket {
                name: of,
                path: place,
            },
        ) => {
            // In an object's name `..` is a name like others.
            let below = path.strip_prefix(place.as_str());
            name == of
                && below.is_some_and(|rest| {
                    place.is_empty() || rest.is_empty() || rest.starts_with('/')
                })
        }
        _ => false,
    }
}

/// Follows links and `..` in a folder's path, as far as it exists.
fn real(location: Location) -> Location {
    match location {
        Location::Folder(folder) => Location::Folder(real_path(&folder)),
        bucket => bucket,
    }
}

fn real_path(path: &Path) -> PathBuf {
    let mut real = PathBuf::new();
    for component in path.components() {
        match component {
            // What is so far has no link in it, so its parent is what the system takes.
            Component::ParentDir => drop(real.pop()),
            component => real.push(component),
        }
        if let Ok(followed) = real.canonicalize() {
            real = followed;
        }
    }
    real
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(places: &[&str]) -> AllowedLocations {
        AllowedLocations::read(places.iter().copied()).unwrap()
    }

    #[test]
    fn a_folder_allows_what_is_below_it_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("runs"), dir.path().join("runs-of-others"));
        std::fs::create_dir_all(inside.join("a")).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        let allowed = allowed(&[inside.to_str().unwrap()]);
        for (location, holds) in [
            ("runs", true),
            ("runs/", true),
            ("runs/a", true),
            ("runs/not/there/yet", true),
            ("runs/a/../a", true),
            ("runs/not/../there", true),
            ("runs-of-others", false),
            ("runs/..", false),
            ("runs/a/../../runs-of-others", false),
            ("runs/not/../../x", false),
            ("runs/link", false),
            ("runs/link/x", false),
            // The system goes to the parent of what the link leads to.
            ("runs/link/../runs/a", true),
            ("", false),
        ] {
            let location = dir.path().join(location);
            let location = location.to_str().unwrap();
            assert_eq!(allowed.have(location).unwrap(), holds, "{location}");
            let url = format!("file://{location}");
            assert_eq!(allowed.have(&url).unwrap(), holds, "{url}");
        }
        assert!(!allowed.have("s3://runs/a").unwrap());
        assert!(allowed.have("").is_err());
    }

    #[test]
    fn a_bucket_allows_its_part_alone() {
        let one = allowed(&["s3://bucket/jobs", ""]);
        for (location, holds) in [
            ("s3://bucket/jobs", true),
            ("s3://bucket/jobs/1", true),
            ("S3A://bucket/jobs/1", true),
            ("s3://bucket/jobs-of-others", false),
            ("s3://bucket", false),
            ("s3://other/jobs", false),
            ("/jobs", false),
        ] {
            assert_eq!(one.have(location).unwrap(), holds, "{location}");
        }
        assert!(allowed(&["s3://bucket"]).have("s3://bucket/all").unwrap());
        assert!(allowed(&["/"]).have("/etc/passwd").unwrap());
        for location in ["/etc/passwd", "s3://bucket/all"] {
            assert!(allowed(&["any"]).have(location).unwrap());
            assert!(!allowed(&["./any"]).have(location).unwrap());
        }
        assert!(
            !allowed(&[])
                .and("any")
                .unwrap()
                .have("/etc/passwd")
                .unwrap()
        );
        assert_eq!(allowed(&[]).to_string(), "none");
        assert!(one.to_string().contains("bucket/jobs"), "{one}");
    }
}
