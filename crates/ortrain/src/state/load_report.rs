//! Comparison of a file with the parameters of a state.

/// Comparison of a file with the parameters of a state.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let names = [("fc2.bias".into(), "classifier.bias".into())].into_iter().collect();
/// state.save_safetensors(&path, &names)?;
/// let report = state.load_safetensors(&path, &Default::default(), false)?;
/// assert_eq!(report.missing, ["fc2.bias"]);
/// assert_eq!(report.unexpected, ["classifier.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters that were loaded from the file, by their names in the state, sorted.
    pub loaded: Vec<String>,
    /// Parameters that are missing in the file, by their names in the state, sorted. They remain unchanged.
    pub missing: Vec<String>,
    /// Tensors of the file without a parameter in the state, by their names in the file, sorted.
    pub unexpected: Vec<String>,
}

impl LoadReport {
    /// Returns true if the file has exactly the parameters of the state.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }
}

/// Describes missing and unexpected names as the end of a sentence; lists the first few of each.
pub(crate) fn describe_difference(report: &LoadReport) -> String {
    const SHOWN: usize = 5;
    let list = |names: &[String]| {
        let quoted: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
        let hidden = names.len().saturating_sub(SHOWN);
        let suffix = if hidden == 0 { String::new() } else { format!(" and {hidden} more") };
        quoted.join(", ") + &suffix
    };
    let mut parts = Vec::new();
    if !report.missing.is_empty() {
        parts.push(format!("it lacks {}", list(&report.missing)));
    }
    if !report.unexpected.is_empty() {
        parts.push(format!("it has {}, which the state lacks", list(&report.unexpected)));
    }
    parts.join("; ")
}
