//! Operators on sequences. They are rewritten to tensors before types are inferred.

/// Operators that produce or read sequences.
pub(crate) const OPERATORS: [&str; 9] = [
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SequenceMap",
    "SplitToSequence",
];

/// Returns true if an operator produces or reads sequences.
pub(crate) fn is_sequence_operator(domain: &str, name: &str) -> bool {
    domain.is_empty() && OPERATORS.contains(&name)
}
