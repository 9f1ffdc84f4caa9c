//! Interfaces beside [`Module`](crate::Module): sessions, the gradient model, the classic training session.

pub mod classic;
pub(crate) mod forward_backward;
pub mod gradient;
pub(crate) mod gradient_checks;
pub(crate) mod gradient_nodes;
pub(crate) mod gradient_options;
pub(crate) mod inference_session;
pub(crate) mod session_options;
pub(crate) mod training_session;
