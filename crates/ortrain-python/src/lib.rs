//! Python classes of ortrain; `python/ortrain` is their documented interface.
#![deny(unsafe_code)]
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands extracted arguments over by value")]

mod artifacts;
mod classic;
mod cuda_packages;
mod device;
mod dlpack;
mod error;
mod forward_backward;
mod gil;
mod gradient;
mod inference;
mod inputs;
mod inspection;
mod lent;
mod lora;
mod model;
mod optim;
mod ort_device;
mod ranks;
mod records;
mod run_options;
mod schedule;
mod session;
mod shapes;
mod state;
mod training;
mod value;
mod vector;

use pyo3::prelude::*;

#[pymodule]
mod _ortrain {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::artifacts::{
        checkpoint_initializers, convert_model, describe_model, generate_artifacts, loss_fragment,
        open_batch, optimizer_model, replace_head, result_names, save_checkpoint, training_models,
        with_float_weights,
    };
    #[pymodule_export]
    use crate::classic::ClassicSession;
    #[pymodule_export]
    use crate::device::{DeviceArray, device_name, devices};
    #[pymodule_export]
    use crate::forward_backward::{ForwardBackward, LiveForward, initializers, with_initializers};
    #[pymodule_export]
    use crate::gradient::{GradientGraph, grad, vjp};
    #[pymodule_export]
    use crate::inference::InferenceSession;
    #[pymodule_export]
    use crate::inspection::{Inspection, declarations, dump, inspect, operators};
    #[pymodule_export]
    use crate::lora::{
        AdaptedLayer, activate_adapters, active_adapters, adapter_targets, add_adapter,
        add_adapter_by_reference, add_adapter_to_file, base_by_reference, load_peft, load_peft_to_file,
        merge_adapters, present_adapters, remove_adapter, row_adapters, save_peft, unmerge_adapters,
    };
    #[pymodule_export]
    use crate::model::{ModelChanges, OperatorLibrary};
    #[pymodule_export]
    use crate::optim::{OwnOptimizer, described_optimizer, optimizer_spec, optimizer_table};
    #[pymodule_export]
    use crate::ort_device::OrtDevice;
    #[pymodule_export]
    use crate::ranks::RankControl;
    #[pymodule_export]
    use crate::records::{
        CommunicationTime, DescribedOutput, DeviceInfo, GradientStop, Instruction, LoadReport, LossFragment,
        MemoryBytes, ModelDescription, ModelMetadata, NodeNote, Obstacle, OperatorInfo, OptimizerFlag,
        OptimizerRow, OptimizerSetting, ParameterInfo, ParameterNorms, Plane, PlaneTensor, Precision,
        QuantizedTensor, ScheduleKind, StateLayout, StepCost, StopCandidate, Update, ValueDescription,
    };
    #[pymodule_export]
    use crate::run_options::RunOptions;
    #[pymodule_export]
    use crate::schedule::{LrScheduler, Schedule, curve_steps, draw_curve, schedule_kinds};
    #[pymodule_export]
    use crate::session::TrainingSession;
    #[pymodule_export]
    use crate::state::CheckpointState;
    #[pymodule_export]
    use crate::training::{LinearLRScheduler, Module, Optimizer, Profile};
    #[pymodule_export]
    use crate::value::OrtValue;
    #[pymodule_export]
    use crate::vector::{OrtValueCache, OrtValueVector};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
