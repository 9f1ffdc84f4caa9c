//! Times of instructions, from the clock of the device.

use std::time::{Duration, Instant};

use ortrain_program::DeviceError;

use crate::device::Device;
use crate::memory::read_buffer;

/// Maximum number of timed instructions per submission: two queries each, of 4096 in a query set.
pub(crate) const MAX_TIMED_INSTRUCTIONS: usize = 2048;
/// Bytes of a query.
const QUERY_BYTES: usize = 8;

/// Timestamp queries for some instructions.
#[derive(Debug)]
pub(crate) struct TimestampQueries {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    count: usize,
}

impl TimestampQueries {
    /// Creates queries for `count` instructions, at most [`MAX_TIMED_INSTRUCTIONS`]. Returns `None` on a device without a clock.
    pub(crate) fn new(device: &Device, count: usize) -> Option<TimestampQueries> {
        if !device.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let queries = device.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2 * count as u32,
        });
        let resolved = device.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: (2 * count * QUERY_BYTES) as u64,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Some(TimestampQueries { queries, resolved, count })
    }

    /// Begins a pass that is timed as instruction `number`.
    pub(crate) fn pass<'e>(
        &self,
        encoder: &'e mut wgpu::CommandEncoder,
        index: usize,
    ) -> wgpu::ComputePass<'e> {
        let first = 2 * index as u32;
        encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: None,
            timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                query_set: &self.queries,
                beginning_of_pass_write_index: Some(first),
                end_of_pass_write_index: Some(first + 1),
            }),
        })
    }

    /// Submits the recorded work, waits for it, and returns the begin and end of each instruction. The first
    /// instruction begins at the submission, by the clock of the host.
    pub(crate) fn finish(
        &self,
        device: &Device,
        mut encoder: wgpu::CommandEncoder,
    ) -> Result<Vec<(Instant, Instant)>, DeviceError> {
        encoder.resolve_query_set(&self.queries, 0..2 * self.count as u32, &self.resolved, 0);
        let start = Instant::now();
        device.queue.submit([encoder.finish()]);
        let mut bytes = vec![0; 2 * self.count * QUERY_BYTES];
        read_buffer(device, &self.resolved, 0, &mut bytes)?;
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
        let (first, period) = (ticks.first().copied().unwrap_or(0), device.queue.get_timestamp_period());
        let at = |tick: u64| {
            start + Duration::from_nanos((tick.saturating_sub(first) as f64 * f64::from(period)) as u64)
        };
        Ok(ticks.chunks_exact(2).map(|pair| (at(pair[0]), at(pair[1].max(pair[0])))).collect())
    }
}
