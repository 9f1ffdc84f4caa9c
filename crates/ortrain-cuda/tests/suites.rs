//! All suites of the test kit on the software driver, float64 included. Every run is repeated as a graph, and with the
//! lanes in falling order.

mod common;

use std::sync::Arc;

use ortrain_expr::Precision;
use ortrain_program::{Backend, Bf16Fallback};
use ortrain_testkit::programs::{Kinds, Size};
use ortrain_testkit::suites::{
    self, Report, attention, attributes, captured, convolutions, groups, loops, narrowing, normalizations,
    panels, poolings, precision, sequences,
};

use common::checked::Checked;
use common::cuda;

fn backend() -> Arc<dyn Backend> {
    Arc::new(Checked(Arc::new(cuda().clone())))
}

/// Checks a report, and prints its counts.
#[allow(clippy::print_stdout, reason = "counts are looked at with --nocapture")]
fn passes(suite: &str, report: &Report) {
    let Report { passed, refused, failed } = report;
    let (refused, failed, kernels) = (refused.len(), failed.len(), cuda().counts().compilations);
    println!("{suite}: {passed} pass, {refused} are refused, {failed} differ; {kernels} compilations");
    report.passes();
}

const KINDS: Kinds = Kinds {
    jumps: false,
    narrow: false,
    windows: true,
    parts: true,
    updates: false,
    segments: false,
    size: Size::Small,
};

#[test]
fn cases() {
    passes("cases", &suites::cases(&backend()));
}

#[test]
fn attentions() {
    passes("attention", &attention::agree(&backend()));
}

#[test]
fn attributes_agree() {
    passes("attributes", &attributes::agree(&backend(), 48));
}

#[test]
fn narrowed_layers_agree() {
    passes("narrowing", &narrowing::agree(&backend()));
}

#[test]
fn convolutions_agree() {
    passes("convolutions", &convolutions::agree(&backend(), 96));
}

#[test]
fn poolings_agree() {
    passes("poolings", &poolings::agree(&backend(), 96));
}

#[test]
fn normalizations_agree() {
    passes("normalizations", &normalizations::agree(&backend(), 96));
}

#[test]
fn rounded_factors_agree() {
    passes("precision", &precision::agree(&backend()));
}

#[test]
fn captured_programs() {
    passes("captured", &captured::agree(&backend()));
}

#[test]
fn loops_agree() {
    passes("loops", &loops::agree(&backend()));
}

#[test]
fn panels_are_not_packed() {
    passes("panels off", &panels::agree(&backend()));
}

#[test]
fn groups_agree() {
    passes("groups", &groups::agree(&backend()));
}

#[test]
fn sequences_agree() {
    passes("sequences", &sequences::agree(&backend()));
}

#[test]
fn planned_programs() {
    passes("planned programs", &suites::random_programs(&backend(), KINDS, 0..150));
}

#[test]
fn planned_programs_with_updates_and_segments() {
    let updates = Kinds { updates: true, ..KINDS };
    passes("programs with updates", &suites::random_programs(&backend(), updates, 0..40));
    let segments = Kinds { segments: true, ..KINDS };
    passes("programs with segments", &suites::random_programs(&backend(), segments, 0..40));
}

/// Factors are rounded only on request.
#[test]
fn precision_is_chosen() {
    let refused = cuda().with_precision(Precision::Bf16, Bf16Fallback::None).unwrap_err();
    assert!(refused.to_string().contains("bf16_fallback=\"emulated\""), "{refused}");
    let chosen = cuda().with_precision(Precision::Bf16, Bf16Fallback::Emulated).expect("it is emulated");
    assert_eq!(chosen.bf16_unit(), Some("emulated"));
}
