//! Inspection of a model before training: trained and frozen constants with the reasons, obstacles, cost of a
//! step.

use ortrain_graph::Graph;

use crate::model::file_inspection::{described_inputs, inspect_artifact, inspect_other};
use crate::model::graph_inspection::{InspectionState, inspect_graph, inspect_loaded};
use crate::model::inspection::{Inspection, Scope};
use crate::model::obstacle::{DEFAULT_FIX, Obstacle, to_obstacle};
use crate::model::step_cost::{Plan, build_artifacts, input_shapes, plan_step};
use crate::train::optimizer::optimizer_of_model;
use crate::{Error, FileKind, InspectOptions, ModelSource, Result};

/// Inspects a model and determines which constants would be trained.
///
/// Trained are floats that reach the loss through differentiable operators, unless the exporter computed them
/// from data or by a formula. Not trained are
///
/// - running statistics, and the mean, variance or deviation of a normalization that is written as
///   arithmetic;
/// - constants of element-wise preprocessing of an input before the first layer: a mean, a scale;
/// - tables of sines of positions, the frequencies that positions are multiplied by, and constants that are
///   only combined with integers;
/// - ones and zeros that an exporter wrote for a normalization without scale and bias, and initial states of
///   recurrent layers with equal values;
/// - one-element tensors that a program filled, then updated in part, concatenated or selected from;
/// - tables of counts, grid points, strides, box sizes, coordinates that a small network turns into a bias;
/// - attention masks that are added to scores before the softmax, one filter for all channels, the vectors of
///   a power iteration;
/// - scalars in arithmetic (an epsilon, an exponent). A one-element constant is trained in three cases: it is
///   a weight input of a node, it is the bias of one output, or its name indicates a parameter. Such a name
///   has a word (`bias`, `logit_scale`) or a path of attributes (`blocks.0.gate`), as exporters name
///   parameters.
///
/// The report gives a reason and the strength of the evidence for each constant; `requires_grad` of artifacts
/// overrides the choice.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the file cannot be read, or a value of the scope does not exist. Errors of operators are part of the
/// report.
pub fn inspect(model: ModelSource, scope: &Scope) -> Result<Inspection> {
    inspect_with(model, scope, &InspectOptions::default())
}

/// Inspects a model like [`inspect`], and plans a training step of a [`Module`](crate::Module) for inputs of
/// these shapes.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InspectOptions, Scope, inspect_with};
///
/// let open = inspect_with(setup::MODEL.into(), &Scope::Outputs, &InspectOptions::default())?;
/// assert_eq!(open.open_inputs, [("x".to_owned(), "float32[batch, 64]".to_owned())]);
/// let options = InspectOptions::default().shape("x", &[8, 64]);
/// let found = inspect_with(setup::MODEL.into(), &Scope::Outputs, &options)?;
/// println!("{} bytes", found.step.unwrap().total());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`inspect`]; also if the shapes do not fit the model.
pub fn inspect_with(model: ModelSource, scope: &Scope, options: &InspectOptions) -> Result<Inspection> {
    let label = model.label("the model");
    if let Some(found) = inspect_other(&model)? {
        check_default_options(&label, found.kind, scope, options)?;
        return Ok(found);
    }
    let model = model.load_for_gradients()?;
    if let Ok(graph) = Graph::from_model(&model) {
        let kind = FileKind::of_graph(&graph);
        if kind != FileKind::ForwardModel && *scope == Scope::Outputs && *options == InspectOptions::default()
        {
            let optimizer =
                (kind == FileKind::OptimizerModel).then(|| optimizer_of_model(&label, &model)).transpose()?;
            return Ok(Inspection { optimizer, ..inspect_artifact(kind, &graph) });
        }
        if matches!(kind, FileKind::TrainingModel | FileKind::OptimizerModel) {
            check_default_options(&label, kind, scope, options)?;
        }
    }
    let InspectionState { mut inspection, graph, values, .. } = inspect_graph(&label, &model, scope)?;
    inspection.inputs = described_inputs(&graph);
    let shapes = input_shapes(&label, &graph, options)?;
    for (name, dims) in &shapes {
        if dims.is_none() {
            let ty = graph.find(name).map_or_else(String::new, |id| graph.value(id).ty.to_string());
            inspection.open_inputs.push((name.clone(), ty));
        }
    }
    let shapes: Option<Vec<(String, Vec<usize>)>> =
        shapes.into_iter().map(|(name, dims)| Some((name, dims?))).collect();
    if inspection.obstacles.is_empty() && !values.is_empty() {
        // Artifacts support symbolic sizes, too: an error of their generation is an obstacle for every size.
        let artifacts = build_artifacts(&label, model, &inspection, &values);
        let planned =
            artifacts.and_then(|generated| shapes.map(|shapes| plan_step(generated, shapes)).transpose());
        match planned {
            Ok(None) => {}
            Ok(Some(Plan::Values(inputs))) => inspection.value_inputs = inputs,
            Ok(Some(Plan::Step(step, scheduled))) => {
                for note in &mut inspection.control_flow {
                    if !scheduled.contains(&note.node) {
                        note.what =
                            "it is inlined: its branch is known, or its iterations are unrolled".into();
                    }
                }
                inspection.step = Some(step);
            }
            Err(error) => {
                let text = error.to_string();
                inspection.obstacles.push(match &error {
                    Error::Model { source, .. } | Error::Shapes(source) => to_obstacle(source, &label),
                    _ => Obstacle { node: None, operator: None, what: text.clone(), fix: DEFAULT_FIX.into() },
                });
                inspection.obstacle = Some(text);
            }
        }
    }
    Ok(inspection)
}

/// Returns an error if the scope or options require a forward model.
fn check_default_options(label: &str, kind: FileKind, scope: &Scope, options: &InspectOptions) -> Result<()> {
    if *scope == Scope::Outputs && *options == InspectOptions::default() {
        return Ok(());
    }
    Err(Error::WrongModel {
        model: label.to_owned(),
        reason: format!(
            "it is {}, but loss_input_names, batch_size and shapes are for forward models; give the forward model \
             from which it was made",
            kind.name_with_article()
        ),
    })
}

/// Inspects a model like [`inspect`], but errors of operators are errors.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Scope, inspect_strictly};
///
/// assert!(inspect_strictly(setup::MODEL.into(), &Scope::Outputs)?.obstacles.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`inspect`]; also for errors of operators.
#[doc(hidden)]
pub fn inspect_strictly(model: ModelSource, scope: &Scope) -> Result<Inspection> {
    let label = model.label("the model");
    inspect_loaded(&label, &model.load_for_gradients()?, scope)
}
