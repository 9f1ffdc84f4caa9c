//! Atomic writes: a file is complete or unchanged, keeps its mode and owner, and is written through symbolic links.

#![allow(clippy::unwrap_used)]
#![cfg(unix)]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use ortrain_files::{Error, Staged, resolved, sibling_path};

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = Staged::beside(path)?;
    file.append(bytes)?;
    file.sync()?;
    file.persist()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn mode_is_preserved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    fs::write(&path, "old").unwrap();
    for expected in [0o640, 0o600, 0o664, 0o755, 0o400, 0o2750] {
        fs::set_permissions(&path, Permissions::from_mode(expected)).unwrap();
        let mut file = Staged::beside(&path).unwrap();
        file.append(b"new").unwrap();
        let temporary = names(folder.path()).into_iter().find(|name| name.ends_with(".tmp")).unwrap();
        let temporary_mode = mode(&folder.path().join(temporary));
        assert_eq!(
            temporary_mode & !expected,
            0,
            "{expected:o}: nobody else reads it while it is written, but {temporary_mode:o}"
        );
        file.sync().unwrap();
        file.persist().unwrap();
        assert_eq!(format!("{:o}", mode(&path)), format!("{expected:o}"));
    }
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn new_files_have_the_default_mode() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    File::create(at("plain")).unwrap();
    write(&at("new"), b"x").unwrap();
    assert_eq!(mode(&at("new")), mode(&at("plain")));
    fs::set_permissions(at("new"), Permissions::from_mode(0o600)).unwrap();
    Staged::beside_like(&at("new.data"), &at("new")).unwrap().persist().unwrap();
    assert_eq!(mode(&at("new.data")), 0o600);
}

/// Only root can change the owner of a file.
#[test]
fn owner_is_preserved_if_permitted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    fs::write(&path, "old").unwrap();
    let metadata = fs::metadata(&path).unwrap();
    let changed = std::os::unix::fs::chown(&path, Some(1234), Some(2345)).is_ok();
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    write(&path, b"new").unwrap();
    let now = fs::metadata(&path).unwrap();
    let expected = if changed { (1234, 2345) } else { (metadata.uid(), metadata.gid()) };
    assert_eq!((now.uid(), now.gid(), now.mode() & 0o777), (expected.0, expected.1, 0o640));
}

#[test]
fn link_targets_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("store/deep")).unwrap();
    fs::write(at("store/deep/c"), "old").unwrap();
    fs::set_permissions(at("store/deep/c"), Permissions::from_mode(0o640)).unwrap();
    symlink("deep/c", at("store/second")).unwrap();
    symlink("store/second", at("first")).unwrap();
    write(&at("first"), b"new").unwrap();
    assert_eq!(fs::read(at("store/deep/c")).unwrap(), b"new");
    assert_eq!(mode(&at("store/deep/c")), 0o640);
    assert_eq!(fs::read_link(at("first")).unwrap(), Path::new("store/second"));
    assert_eq!(fs::read_link(at("store/second")).unwrap(), Path::new("deep/c"));
    assert_eq!(
        (names(folder.path()), names(&at("store/deep"))),
        (vec!["first".into(), "store".into()], vec!["c".into()])
    );

    // A dangling link: its target is created, as `open` does it.
    symlink("store/later", at("dangling")).unwrap();
    write(&at("dangling"), b"made").unwrap();
    assert_eq!(fs::read(at("store/later")).unwrap(), b"made");
    assert!(fs::symlink_metadata(at("dangling")).unwrap().is_symlink());
    assert_eq!(resolved(&at("dangling")), fs::canonicalize(at("store/later")).unwrap());
    symlink("nowhere/c", at("lost")).unwrap();
    assert_eq!(
        write(&at("lost"), b"x").unwrap_err().to_string(),
        format!(
            "cannot write {}: there is no folder {}; create it first",
            at("lost").display(),
            at("nowhere").display()
        )
    );
    // A link to itself, and a cycle of two links.
    symlink("self", at("self")).unwrap();
    symlink("b", at("a")).unwrap();
    symlink("a", at("b")).unwrap();
    for name in ["self", "a", "b"] {
        assert_eq!(
            write(&at(name), b"x").unwrap_err().to_string(),
            format!(
                "cannot write {}: it is a symbolic link that leads back to itself; remove it or name another file",
                at(name).display()
            )
        );
        assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink());
    }
}

#[test]
fn special_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    symlink("/dev/null", at("to null")).unwrap();
    symlink("pipe", at("to pipe")).unwrap();
    let before = names(folder.path());
    for (path, kind) in [
        (PathBuf::from("/dev/null"), "a device"),
        (at("to null"), "a device"),
        (at("pipe"), "a pipe"),
        (at("to pipe"), "a pipe"),
        (at("socket"), "a socket"),
    ] {
        assert_eq!(
            write(&path, b"x").unwrap_err().to_string(),
            format!(
                "cannot write {}: it is {kind}, and only regular files are replaced; name another file",
                path.display()
            )
        );
    }
    assert_eq!(
        write(&at("folder"), b"x").unwrap_err().to_string(),
        format!("cannot write {}: it is a folder; name a file in it", at("folder").display())
    );
    for (path, shown) in [(PathBuf::new(), "\"\"".to_owned()), (at("new/"), format!("{:?}", at("new/")))] {
        let error = write(&path, b"x").unwrap_err();
        assert_eq!(error.to_string(), format!("{shown} is not the path of a file"));
    }
    assert_eq!(names(folder.path()), before);
    assert!(!fs::symlink_metadata("/dev/null").unwrap().is_file());
}

#[test]
fn longest_names_are_supported() {
    let folder = tempfile::tempdir().unwrap();
    for length in [200, 214, 215, 216, 250, 255] {
        let name = "x".repeat(length);
        let path = folder.path().join(&name);
        write(&path, b"1").unwrap();
        write(&path, b"2").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2");
        // A leftover of a killed process is found again.
        let left = sibling_path(&path, "77-3.tmp");
        fs::write(&left, "half of").unwrap();
        write(&path, b"3").unwrap();
        assert!(!left.exists(), "{length}");
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(names(folder.path()), [""; 0]);
    let path = folder.path().join("x".repeat(256));
    let error = write(&path, b"x").unwrap_err().to_string();
    assert_eq!(error, format!("cannot write {}: File name too long (os error 36)", path.display()));
}

#[test]
fn leftovers_of_killed_processes_are_swept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["m.77-0.tmp", "m.4000000000-12.tmp", ".m.78-1.tmp"] {
        fs::write(at(name), "half of").unwrap();
        fs::set_permissions(at(name), Permissions::from_mode(0o400)).unwrap();
    }
    let others = ["m.77.bak", "m.best.tmp", "m.tmp", "n.77-0.tmp", "m.9-9.tmp", "m.8-8.tmp"];
    others[..4].iter().for_each(|name| fs::write(at(name), "somebody else's").unwrap());
    // Opening a pipe would wait.
    assert!(Command::new("mkfifo").arg(at("m.9-9.tmp")).status().unwrap().success());
    let busy = File::create(at("m.8-8.tmp")).unwrap();
    busy.lock().unwrap();
    write(&at("m"), b"x").unwrap();
    let mut left = [others.as_slice(), &["m"]].concat();
    left.sort_unstable();
    assert_eq!(names(folder.path()), left);
}
