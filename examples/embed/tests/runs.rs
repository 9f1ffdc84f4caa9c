//! The example runs as documented.

use std::path::Path;
use std::process::Command;

fn run(folder: &Path) -> Vec<String> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../perceptron.onnx");
    let done = Command::new(env!("CARGO_BIN_EXE_embed")).args([&model, folder]).output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn learns_and_resumes() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = run(folder.path());
    assert_eq!(lines.len(), 6, "{lines:?}");
    let right = |line: &str| line.trim_end_matches(" % right").parse::<f64>().expect("a number");
    assert!(right(&lines[5]) >= 95.0, "{lines:?}");
    // All rounds are done: it exports the model and runs it.
    assert_eq!(run(folder.path()), lines[5..]);
}
