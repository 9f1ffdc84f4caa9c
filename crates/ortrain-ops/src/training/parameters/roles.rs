//! Roles of the constants of a model, with the evidence.

/// Role of a constant of a model in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// Trained.
    Trained,
    /// Running statistic: stored in the checkpoint, but not trained.
    Statistic,
    /// Constant: unchanged in the models.
    Constant,
}

impl ParameterRole {
    /// Returns the name of the role in reports.
    ///
    /// ```
    /// use ortrain_ops::training::ParameterRole;
    ///
    /// assert_eq!(ParameterRole::Trained.name(), "trained");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ParameterRole::Trained => "trained",
            ParameterRole::Statistic => "statistic",
            ParameterRole::Constant => "constant",
        }
    }
}

/// Strength of the evidence for the role of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Confidence {
    /// The file does not determine the role.
    Guess,
    /// A name, a value or a pattern of nodes is evidence.
    Likely,
    /// The type of the constant or its operator input is evidence.
    Certain,
}

impl Confidence {
    /// Returns the name of the confidence in reports.
    ///
    /// ```
    /// use ortrain_ops::training::Confidence;
    ///
    /// assert_eq!(Confidence::Guess.name(), "guess");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Confidence::Guess => "guess",
            Confidence::Likely => "likely",
            Confidence::Certain => "certain",
        }
    }
}

/// Role of one constant, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// Role.
    pub role: ParameterRole,
    /// Strength of the evidence.
    pub confidence: Confidence,
    /// Reason, as a part of a sentence.
    pub reason: String,
    /// Names of the nodes that use the constant; a node without a name has the name of its first output.
    pub nodes: Vec<String>,
}

/// Returns a sentence about trained constants of guessed role, each with its reason; `None` without such constants.
///
/// ```
/// use ortrain_ops::training::about_guesses;
///
/// let sentence = about_guesses(&[("val_3", "it is a float input of node \"add\" (Add)")]).unwrap();
/// assert!(sentence.starts_with("\"val_3\" may not be a parameter, but is trained"));
/// ```
#[must_use]
pub fn about_guesses(guesses: &[(&str, &str)]) -> Option<String> {
    const SHOWN: usize = 3;
    let (_, reason) = guesses.first()?;
    let mut names: Vec<String> = guesses.iter().take(SHOWN).map(|(name, _)| format!("{name:?}")).collect();
    if guesses.len() > SHOWN {
        names.push(format!("{} more", guesses.len() - SHOWN));
    }
    let last = names.pop().unwrap_or_default();
    let (subject, verb) = match names[..] {
        [] => (last, "may not be a parameter, but is"),
        _ => (format!("{} and {last}", names.join(", ")), "may not be parameters, but are"),
    };
    Some(format!(
        "{subject} {verb} trained by default ({reason}); name the parameters in requires_grad, or the constants in \
         frozen_params"
    ))
}
