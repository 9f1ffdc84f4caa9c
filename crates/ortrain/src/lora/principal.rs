//! Initial values from the weight: the factors take the largest part of it, and the weight of the model keeps the rest.
//!
//! (F. Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models", 2024;
//! K. Büyükakyüz, "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models", 2024.) The formulas are PEFT's.

use ortrain_graph::{Graph, Tensor};
use ortrain_ops::training::{AdapterTarget, LayerKind, add_delta, weight_matrix, weight_readers};

use super::decompose::{LeadingQr, Matrix, Singular, leading_qr, leading_singular};
use super::{Init, LoraOptions};
use crate::{Error, Result};

/// Factors of an adapter, and the rest of the weight.
pub(super) struct Principal {
    pub(super) factors: [Tensor; 2],
    pub(super) rest: Tensor,
}

/// Returns true if the factors of a layer come from its weight. Tables have PEFT's random factors for every method.
pub(super) fn takes_weight(target: &AdapterTarget, init: Init) -> bool {
    init.changes_base() && target.kind != LayerKind::Embedding
}

/// Checks that the weights of layers can be split into factors and a rest.
pub(super) fn check(
    label: &str,
    graph: &Graph,
    targets: &[AdapterTarget],
    options: &LoraOptions,
) -> Result<()> {
    let method = options.init.name();
    if options.init.changes_base() && (options.scale() as f32) <= 0.0 {
        return Err(Error::Argument(format!(
            "init={method:?} needs a positive alpha, got {:?}",
            options.alpha
        )));
    }
    for target in targets.iter().filter(|target| takes_weight(target, options.init)) {
        let fail = |reason: String| {
            Err(Error::Argument(format!(
                "init={method:?} is not supported for {}: {reason}; exclude it, or choose another init",
                target.node
            )))
        };
        let weight = &target.weight;
        if target.kind != LayerKind::Linear {
            return fail(format!(
                "it is a layer of the kind {:?}, and only linear ones can have it",
                target.kind.name()
            ));
        }
        if target.has_integers() {
            return fail(format!("its weight {weight:?} consists of integers"));
        }
        let is_target =
            |reader: &String| targets.iter().any(|other| other.has_form_of(target) && other.root() == reader);
        if let Some(other) = weight_readers(graph, weight).iter().find(|reader| !is_target(reader)) {
            return fail(format!("its weight {weight:?} is also read for {other:?}, which gets no adapter"));
        }
        if constant(label, graph, weight)?.to_f64().iter().any(|number| !number.is_finite()) {
            return fail(format!("its weight {weight:?} has numbers that are not finite"));
        }
    }
    Ok(())
}

/// Returns the rest of the weight of a layer, after the checks of [`check`].
pub(super) fn rest(
    label: &str,
    graph: &Graph,
    targets: &[AdapterTarget],
    target: &AdapterTarget,
    options: &LoraOptions,
) -> Result<Tensor> {
    let same: Vec<AdapterTarget> =
        targets.iter().filter(|other| other.has_form_of(target)).cloned().collect();
    check(label, graph, &same, options)?;
    Ok(split(target, constant(label, graph, &target.weight)?, options)?.rest)
}

/// Splits the weight of a layer.
pub(super) fn split(target: &AdapterTarget, weight: &Tensor, options: &LoraOptions) -> Result<Principal> {
    let (rank, scale) = (options.rank, options.scale());
    let elements = weight_matrix(target, weight).map_err(argument_error)?;
    let matrix = Matrix { rows: target.outputs, columns: target.inputs, elements };
    let (a, b) = match options.init {
        Init::Olora => {
            let LeadingQr { q, r } = leading_qr(&matrix, rank);
            (r, q)
        }
        _ => {
            let Singular { values, mut left, mut right } = leading_singular(&matrix, rank);
            for factor in [&mut left, &mut right] {
                for (row, value) in factor.elements.chunks_exact_mut(factor.columns).zip(&values) {
                    let root = (value / scale).sqrt();
                    row.iter_mut().for_each(|element| *element *= root);
                }
            }
            (right, left.transposed())
        }
    };
    let tensor =
        |matrix: &Matrix| Tensor::from_f64(target.dtype, vec![matrix.rows, matrix.columns], &matrix.elements);
    let (a, b) = (tensor(&a), tensor(&b));
    let rest = add_delta(target, weight, (&a, &b), -scale).map_err(argument_error)?;
    Ok(Principal { factors: [a, b], rest })
}

fn constant<'g>(label: &str, graph: &'g Graph, name: &str) -> Result<&'g Tensor> {
    let content = graph.find(name).and_then(|id| graph.value(id).content());
    content.ok_or_else(|| Error::Argument(format!("{label} has no constant {name:?}")))
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn argument_error(error: ortrain_ops::Error) -> Error {
    Error::Argument(error.to_string())
}
