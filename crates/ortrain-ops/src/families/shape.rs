//! placeholder
use crate::infer::Infer;
use crate::op::Definition;
pub(crate) fn arithmetic_on_sizes(_: &mut Infer<'_>, _: &str) {}
pub(crate) fn definitions() -> Vec<Definition> {
    Vec::new()
}
