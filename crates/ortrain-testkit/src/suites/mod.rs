//! Test suites: functions of a backend that every backend's tests call.
//!
//! The outcome of a suite is a [`Report`]. A backend without a type reports it with node and type when a
//! program is compiled; its tests name the permitted type.

use std::iter::FromIterator;
use std::sync::Arc;

use ortrain_graph::DType;
use ortrain_program::{Backend, GradientMode};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::programs::{Kinds, RandomProgram, numbers, reference, run_program};
use crate::{check_backend, tolerance};

pub mod attention;
pub mod attributes;
pub mod captured;
pub mod convolutions;
pub mod groups;
pub mod loops;
pub mod narrowing;
pub mod normalizations;
pub mod panels;
pub mod poolings;
pub mod precision;
pub mod sequences;

/// Types that have gradients.
pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Outcome of the cases of a suite.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of cases that agree.
    pub passed: usize,
    /// Messages about cases that the backend does not support.
    pub refused: Vec<String>,
    /// Messages about cases that differ.
    pub failed: Vec<String>,
}

/// Message of a backend about an unsupported instruction.
const REFUSAL: &str = "backend cannot run this";

impl FromIterator<Result<(), String>> for Report {
    fn from_iter<I: IntoIterator<Item = Result<(), String>>>(outcomes: I) -> Report {
        let mut report = Report::default();
        for outcome in outcomes {
            match outcome {
                Ok(()) => report.passed += 1,
                Err(message) if message.contains(REFUSAL) => report.refused.push(message),
                Err(message) => report.failed.push(message),
            }
        }
        report
    }
}

impl Report {
    /// Checks that there are cases, and that all of them agree.
    ///
    /// # Panics
    /// If a case does not agree, or there are no cases.
    pub fn passes(&self) {
        let others = [&self.refused[..], &self.failed[..]].concat();
        assert!(others.is_empty(), "{} cases fail:\n{}", others.len(), others.join("\n"));
        assert!(self.passed > 0, "there are no cases");
    }

    /// Checks like [`Report::passes`], but permits cases that are unsupported because of this type.
    ///
    /// # Panics
    /// If a case fails for another reason.
    pub fn passes_without(&self, dtype: DType) {
        let named = |message: &&String| message.contains(&dtype.to_string());
        let (refused, mut failed): (Vec<&String>, Vec<&String>) = self.refused.iter().partition(named);
        failed.extend(&self.failed);
        let text = failed.iter().map(|message| message.as_str()).collect::<Vec<_>>().join("\n");
        assert!(failed.is_empty(), "{} cases fail:\n{text}", failed.len());
        assert!(self.passed > refused.len(), "{} pass, {} are refused", self.passed, refused.len());
    }
}

/// Returns `count` deterministic values of a strategy.
fn samples<S: Strategy>(strategy: S, count: usize) -> impl Iterator<Item = S::Value> {
    let mut runner = TestRunner::deterministic();
    (0..count).map(move |_| {
        let tree = strategy.new_tree(&mut runner).expect("the strategy rejects nothing");
        tree.current()
    })
}

/// Compares every case, forward and backward, with the reference evaluator in float64.
#[must_use]
pub fn cases(backend: &Arc<dyn Backend>) -> Report {
    crate::cases().iter().map(|case| check_backend(case, backend, true)).collect()
}

/// Compares planned random programs of these seeds, in both gradient modes, with the unfused programs on the
/// reference evaluator. Two runs must be bit-identical.
#[must_use]
pub fn random_programs(backend: &Arc<dyn Backend>, kinds: Kinds, seeds: std::ops::Range<u64>) -> Report {
    let runs = seeds.flat_map(|seed| [(seed, GradientMode::Accumulate), (seed, GradientMode::Overwrite)]);
    runs.map(|(seed, entry)| {
        let plain = Arc::new(RandomProgram::new(seed, kinds).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let expected = run_program(&plain, &reference(), seed, entry);
        let [got, second] = [(); 2].map(|()| run_program(&fused, backend, seed, entry));
        if got != second {
            return Err(format!("seed {seed}, {entry:?}: two runs differ\n{fused}"));
        }
        let close = |(x, y): (f64, f64)| (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
        let differs = got.iter().zip(&expected).position(|(got, expected)| {
            got.len() != expected.len() || !numbers(got).zip(numbers(expected)).all(close)
        });
        match differs {
            Some(k) => Err(format!("seed {seed}, {entry:?}: result {k} differs\n{plain}\n{fused}")),
            None => Ok(()),
        }
    })
    .collect()
}
