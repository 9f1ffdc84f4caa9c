//! Models: reading, edits, inspection, export, text.

pub(crate) mod adapted_parameters;
pub(crate) mod base_hash;
pub(crate) mod checks;
pub(crate) mod class_axis;
pub(crate) mod classifiers;
pub(crate) mod computed_parameters;
pub(crate) mod dump;
pub(crate) mod edits;
pub(crate) mod export;
pub(crate) mod file_inspection;
pub(crate) mod file_kind;
pub(crate) mod graph;
pub(crate) mod graph_inspection;
pub(crate) mod inspect;
pub(crate) mod inspection;
pub(crate) mod node_inputs;
pub(crate) mod obstacle;
pub(crate) mod operator_list;
pub(crate) mod operators;
pub(crate) mod origins;
pub(crate) mod postprocessing;
pub(crate) mod report;
pub(crate) mod source;
pub(crate) mod step_cost;
pub(crate) mod stops;
