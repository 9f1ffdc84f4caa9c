//! Tests that a child process, forked from a process with running threads, can compute and end.
#![cfg(unix)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ortrain_kernels::Pool;

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn kill(process: i32, signal: i32) -> i32;
    fn _exit(status: i32) -> !;
}

const NO_HANG: i32 = 1;
const KILL: i32 = 9;

fn work(pool: &Pool) -> usize {
    let sum = AtomicUsize::new(0);
    for _ in 0..50 {
        pool.run(64, usize::MAX, &|task, _| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
    }
    sum.into_inner()
}

const EXPECTED_SUM: usize = 50 * 63 * 32;

/// Forks, computes in the child, and waits for the child.
fn child_computes(pool: &Pool) {
    // SAFETY: the child calls only the pool, and ends by `_exit`.
    let process = unsafe { fork() };
    assert!(process >= 0, "a process can be forked");
    if process == 0 {
        let right = work(pool) == EXPECTED_SUM;
        // SAFETY: ends the child.
        unsafe { _exit(if right { 0 } else { 1 }) };
    }
    let start = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: waits for the child created above.
        let done = unsafe { waitpid(process, &raw mut status, NO_HANG) };
        if done == process {
            break;
        }
        if start.elapsed() > Duration::from_secs(20) {
            // SAFETY: ends the child created above.
            unsafe { kill(process, KILL) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the child computed wrongly or crashed");
}

#[test]
fn a_forked_child_computes() {
    let pool = Pool::new(3);
    assert_eq!(work(&pool), EXPECTED_SUM);
    for _ in 0..10 {
        child_computes(&pool);
        assert_eq!(work(&pool), EXPECTED_SUM, "and the parent goes on");
    }
    // Forks while another thread is inside of a run.
    let stop = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while stop.load(Ordering::Relaxed) == 0 {
                assert_eq!(work(&pool), EXPECTED_SUM);
            }
        });
        for _ in 0..20 {
            child_computes(&pool);
        }
        stop.store(1, Ordering::Relaxed);
    });
}
