//! Reasons why a model cannot be trained.

/// A reason why a model cannot be trained.
///
/// ```
/// use ortrain::{ModelProto, ModelSource, Obstacle, Scope, inspect};
///
/// # fn unknown() -> ModelProto {
/// #     use ortrain::GraphProto;
/// #     use ortrain_onnx::{NodeProto, OperatorSetIdProto, ValueInfoProto};
/// #     let output = vec![ValueInfoProto { name: "y".into(), ..ValueInfoProto::default() }];
/// #     let node = NodeProto { op_type: "Unheard".into(), output: vec!["y".into()], ..NodeProto::default() };
/// #     let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 17 }];
/// #     let graph = Some(GraphProto { node: vec![node], output, ..GraphProto::default() });
/// #     ModelProto { graph, opset_import, ..ModelProto::default() }
/// # }
/// // A model with an operator that nobody knows.
/// let found = inspect(ModelSource::from_proto(&unknown())?, &Scope::Outputs)?;
/// let Obstacle { operator, what, fix, .. } = &found.obstacles[0];
/// assert_eq!(operator.as_deref(), Some("Unheard"));
/// assert!(what.contains("not supported") && fix.contains("operators"));
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Obstacle {
    /// Node, as messages name it, if the obstacle is a node.
    pub node: Option<String>,
    /// Operator of the node.
    pub operator: Option<String>,
    /// Description of the obstacle.
    pub what: String,
    /// Remedy.
    pub fix: String,
}

/// General remedy.
pub(crate) const DEFAULT_FIX: &str = "change the model so that the error does not occur";

/// Returns all obstacles as one sentence.
pub(crate) fn join_obstacles(obstacles: &[Obstacle]) -> String {
    let parts: Vec<String> =
        obstacles.iter().map(|obstacle| format!("{}; {}", obstacle.what, obstacle.fix)).collect();
    match parts.as_slice() {
        [one] => one.clone(),
        all => format!("{} obstacles: {}", all.len(), all.join(". ")),
    }
}

/// Converts an error into an obstacle of a report.
pub(crate) fn to_obstacle(error: &ortrain_ops::Error, label: &str) -> Obstacle {
    use ortrain_ops::{Error as Wrong, OpError};

    let (mut node, mut operator) = (None, None);
    let fix = match error {
        Wrong::UnknownOperators { list } => {
            operator = list.first().and_then(|text| text.split(' ').next()).map(str::to_owned);
            "export the model without it (`python -m ortrain operators` lists all operators), or define it as a \
             function of the model or of an operator library (docs/extending.md)"
                .to_owned()
        }
        Wrong::Opset { oldest, newest, .. } => format!(
            "convert the model to an opset from {oldest} to {newest}, as onnx.version_converter does, or export it anew"
        ),
        Wrong::TooOld { oldest, .. } => {
            format!("raise the opset of the model: onnx.version_converter.convert_version(model, {oldest})")
        }
        Wrong::Node { node: of, source, .. } => {
            node = Some(of.clone());
            operator = of.rsplit(" (").next().and_then(|text| text.strip_suffix(')')).map(str::to_owned);
            match source {
                OpError::Unsupported(_) => {
                    "export the model without this feature, or use another operator".to_owned()
                }
                OpError::Program(_) => "make the shapes smaller".to_owned(),
                _ => format!(
                    "correct the node; onnx.checker.check_model(model, full_check=True) gives details about {label}"
                ),
            }
        }
        Wrong::Function { .. } | Wrong::Call { .. } => {
            "correct the function or the call, or inline it: onnx.inliner.inline_local_functions(model)"
                .to_owned()
        }
        _ => DEFAULT_FIX.to_owned(),
    };
    Obstacle { node, operator, what: error.to_string(), fix }
}
