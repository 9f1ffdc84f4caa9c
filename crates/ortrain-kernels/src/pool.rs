//! Thread pool: one atomic state word, no queue, no allocation per run.
//!
//! A run has a number of tasks that depends on shapes only. Results do not depend on which thread executes a task.
//! Every worker starts with its own share of the tasks, so the same memory is used by the same core in each run. A
//! worker without tasks takes tasks of the others. The calling thread takes part, and never waits for a worker that has
//! not woken up: a late worker finds the run closed.
//!
//! A run can be stopped ([`ortrain_expr::stoppable`]). The stop question is asked between the tasks of the calling
//! thread, and by [`pause`] inside of long tasks. The rest of the run is then dropped, as after a panic of a task.
//!
//! After a fork, the child has none of its parent's threads. The pool detects this and starts new threads.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use ortrain_expr::Stopped;

/// Function of a task number and a worker number.
type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Time that a waiting thread spins: the duration of short runs, and of the gaps between them.
const SPIN_TIME: Duration = Duration::from_micros(30);
/// Time that a waiting thread yields to other threads before it sleeps. The runs of a training step follow each other
/// closely, and waking a thread takes tens of microseconds on some machines.
const POLL_TIME: Duration = Duration::from_micros(150);

/// Polls for a result, up to [`POLL_TIME`].
fn poll_with_timeout<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    loop {
        for _ in 0..32 {
            if let Some(answer) = look() {
                return Some(answer);
            }
            std::hint::spin_loop();
        }
        let waited = begin.elapsed();
        if waited > POLL_TIME {
            return None;
        }
        if waited > SPIN_TIME {
            thread::yield_now();
        }
    }
}

/// Order in which a thread processes its tasks.
#[derive(Clone, Copy)]
enum Direction {
    Forwards,
    Backwards,
}

impl Direction {
    /// Returns the task to execute at position `number` of the range `first..end`.
    fn task_at(self, index: usize, first: usize, end: usize) -> usize {
        match self {
            Direction::Forwards => index,
            Direction::Backwards => first + (end - 1 - index),
        }
    }
}

/// Set of threads that share the tasks of a run.
pub struct Pool {
    /// Requested number of threads, including the caller.
    threads: AtomicUsize,
    /// Id of the process that has a thread inside of `run`, or 0. This thread owns `team`.
    holder: AtomicU32,
    /// Running workers, created by the first run that needs them.
    team: AtomicPtr<Team>,
}

struct Team {
    process: u32,
    /// Number of threads requested when the team was created; there are fewer `workers` if the system refused some.
    requested_threads: usize,
    shared: Arc<Shared>,
    workers: Vec<(JoinHandle<()>, Thread)>,
}

struct Shared {
    /// Flags `OPEN` and `STOP`, the number of workers inside of the run, and in the upper bits the number of the run.
    state: AtomicU64,
    job: UnsafeCell<Job>,
    panicked: AtomicBool,
    panic: UnsafeCell<Option<Box<dyn Any + Send>>>,
    /// One lane per thread; index 0 is the caller.
    lanes: Box<[Lane]>,
}

/// State of one thread, on cache lines of its own.
#[repr(align(128))]
struct Lane {
    /// The tasks are `first..end`; tasks below `next` are taken.
    first: AtomicUsize,
    next: AtomicUsize,
    end: AtomicUsize,
    asleep: AtomicBool,
}

struct Job {
    body: *const Body<'static>,
    direction: Direction,
    /// Number of lanes that take part.
    lanes: usize,
    caller: Thread,
}

const OPEN: u64 = 1 << 31;
const STOP: u64 = 1 << 30;
const INSIDE_MASK: u64 = STOP - 1;
const RUN_INCREMENT: u64 = 1 << 32;

// SAFETY: `job` is written only while no run is open and no worker is inside (see `Team::run`), and read only by
// workers that entered an open run. `panic` is written by the one thread that set `panicked`, and read after all
// threads left.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is used only while the call that set it lasts.
unsafe impl Send for Shared {}

thread_local! {
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
    /// Flag of the run in which this thread takes part: true if the rest of the run is dropped.
    static DROPPED: Cell<*const AtomicBool> = const { Cell::new(std::ptr::null()) };
}

/// Ends the task of this thread, by unwinding, if its run must stop. Long loops inside of tasks call this function.
pub(crate) fn pause() {
    let dropped = DROPPED.get();
    // SAFETY: `Shared::work` sets the pointer, and resets it before its borrow of the team's memory ends.
    if !dropped.is_null() && unsafe { (*dropped).load(Ordering::Relaxed) } {
        resume_unwind(Box::new(Stopped));
    }
    ortrain_expr::pause();
}

/// Guard that marks the thread as inside of a task.
struct TaskGuard(bool);

impl TaskGuard {
    fn enter() -> TaskGuard {
        TaskGuard(IN_TASK.replace(true))
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        IN_TASK.set(self.0);
    }
}

impl Pool {
    /// Creates a pool of `threads` threads, at least one, including the calling thread. Threads start with the first
    /// run.
    #[must_use]
    pub const fn new(threads: usize) -> Pool {
        Pool {
            threads: AtomicUsize::new(if threads == 0 { 1 } else { threads }),
            holder: AtomicU32::new(0),
            team: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Returns the pool of the process. It has one thread per core that the process may use, until
    /// [`Pool::set_num_threads`].
    #[must_use]
    pub fn global() -> &'static Pool {
        static POOL: OnceLock<Pool> = OnceLock::new();
        POOL.get_or_init(|| Pool::new(thread::available_parallelism().map_or(1, usize::from)))
    }

    /// Returns the number of threads, including the calling thread.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.threads.load(Ordering::Relaxed)
    }

    /// Sets the number of threads, from the next run on. Results do not depend on it.
    pub fn set_num_threads(&self, threads: usize) {
        self.threads.store(threads.max(1), Ordering::Relaxed);
    }

    /// Calls `body(task, worker)` once for each task of `0..tasks`, and returns when all are done.
    ///
    /// `worker` is less than `limit` and less than the number of threads. No two tasks run at once with the same
    /// worker. A nested run, and a run that meets another thread's run, is executed by its caller alone, as worker 0.
    ///
    /// # Panics
    /// Propagates the first panic of a task, after the other tasks have ended or been dropped.
    pub fn run(&self, tasks: usize, limit: usize, body: &Body<'_>) {
        self.run_in_direction(Direction::Forwards, tasks, limit, body);
    }

    /// Runs the tasks as [`Pool::run`], in reverse order. Each thread gets the same tasks as in a [`Pool::run`] with
    /// the same number of tasks, and begins with its last one: the data of this task is still in the cache of its core.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn run_backwards(&self, tasks: usize, limit: usize, body: &Body<'_>) {
        self.run_in_direction(Direction::Backwards, tasks, limit, body);
    }

    /// Returns the results of `make` for the tasks `0..tasks`, in order.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn map<T: Send + Sync>(&self, tasks: usize, make: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let results: Vec<OnceLock<T>> = (0..tasks).map(|_| OnceLock::new()).collect();
        self.run(tasks, usize::MAX, &|task, _| {
            results[task].get_or_init(|| make(task));
        });
        results.into_iter().map(|result| result.into_inner().expect("every task was done")).collect()
    }

    fn run_in_direction(&self, direction: Direction, tasks: usize, limit: usize, body: &Body<'_>) {
        let threads = self.num_threads().min(limit).min(tasks);
        if threads > 1
            && !IN_TASK.get()
            && let Some(mut team) = self.acquire_team()
        {
            team.team().run(direction, tasks, threads, body);
            return;
        }
        let _inside = TaskGuard::enter();
        for index in 0..tasks {
            body(direction.task_at(index, 0, tasks), 0);
            pause();
        }
    }

    /// Acquires the team, if no other thread of this process has it.
    fn acquire_team(&self) -> Option<TeamGuard<'_>> {
        let process = std::process::id();
        let mut holder = 0;
        loop {
            match self.holder.compare_exchange(holder, process, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(TeamGuard { pool: self, process }),
                Err(now) if now == process => return None,
                // Either 0 again, or a thread of the parent process, which does not exist after the fork.
                Err(now) => holder = now,
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let team = *self.team.get_mut();
        if !team.is_null() {
            // SAFETY: created by `Box::into_raw`, and `&mut self` excludes other users of the pool.
            unsafe { Box::from_raw(team) }.disband(std::process::id());
        }
    }
}

/// Guard with exclusive access to the team.
struct TeamGuard<'a> {
    pool: &'a Pool,
    process: u32,
}

impl TeamGuard<'_> {
    /// Returns the team. Creates a new team if the pool has no team, or one of a parent process or of another size.
    fn team(&mut self) -> &mut Team {
        let thread_count = self.pool.num_threads();
        let mut team = self.pool.team.load(Ordering::Relaxed);
        // SAFETY: only the holder of the guard changes or frees a team, and this is the holder.
        let fits = !team.is_null()
            && unsafe { (*team).process == self.process && (*team).requested_threads == thread_count };
        if !fits {
            if !team.is_null() {
                self.pool.team.store(std::ptr::null_mut(), Ordering::Relaxed);
                // SAFETY: as above; created by `Box::into_raw`.
                unsafe { Box::from_raw(team) }.disband(self.process);
            }
            team = Box::into_raw(Box::new(Team::new(self.process, thread_count)));
            self.pool.team.store(team, Ordering::Relaxed);
        }
        // SAFETY: as above, and the borrow ends before the guard is dropped.
        unsafe { &mut *team }
    }
}

impl Drop for TeamGuard<'_> {
    fn drop(&mut self) {
        self.pool.holder.store(0, Ordering::Release);
    }
}

impl Team {
    fn new(process: u32, thread_count: usize) -> Team {
        let lane = || {
            let [first, next, end] = [0; 3].map(AtomicUsize::new);
            Lane { first, next, end, asleep: AtomicBool::new(false) }
        };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(Job {
                body: &|_, _| (),
                direction: Direction::Forwards,
                lanes: 0,
                caller: thread::current(),
            }),
            panicked: AtomicBool::new(false),
            panic: UnsafeCell::new(None),
            lanes: (0..thread_count).map(|_| lane()).collect(),
        });
        let workers = (1..thread_count)
            .map_while(|lane| {
                let shared = Arc::clone(&shared);
                // If the system refuses a thread, the pool is slower, but works.
                let worker = thread::Builder::new()
                    .name(format!("ortrain-{lane}"))
                    .spawn(move || shared.worker_loop(lane))
                    .ok()?;
                let thread = worker.thread().clone();
                Some((worker, thread))
            })
            .collect();
        Team { process, requested_threads: thread_count, shared, workers }
    }

    /// Ends the threads, if they belong to `process`. Threads of a parent process do not exist here, and are only
    /// forgotten.
    fn disband(self, process: u32) {
        if self.process != process {
            std::mem::forget(self);
            return;
        }
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        for (worker, thread) in self.workers {
            thread.unpark();
            // A worker catches the panics of tasks, so it does not end by a panic.
            let _ = worker.join();
        }
    }

    fn run(&mut self, direction: Direction, tasks: usize, threads: usize, body: &Body<'_>) {
        let lanes = threads.min(self.workers.len() + 1);
        let shared = &*self.shared;
        for (lane, bounds) in shared.lanes[..lanes].iter().enumerate() {
            let first = tasks * lane / lanes;
            bounds.first.store(first, Ordering::Relaxed);
            bounds.next.store(first, Ordering::Relaxed);
            bounds.end.store(tasks * (lane + 1) / lanes, Ordering::Relaxed);
        }
        // SAFETY: no run is open and no worker is inside of one: the last run waited for all workers, and only the
        // holder opens runs. The extended lifetime is never used: this function returns after all workers left the run.
        unsafe {
            let body = std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body);
            *shared.job.get() = Job { body, direction, lanes, caller: thread::current() };
        }
        // The run number grows, so that a worker detects a new run even if it slept through several.
        let run = (shared.state.load(Ordering::Relaxed) & !(RUN_INCREMENT - 1)).wrapping_add(RUN_INCREMENT);
        shared.state.store(run | OPEN, Ordering::SeqCst);
        for ((_, thread), lane) in self.workers[..lanes - 1].iter().zip(&shared.lanes[1..]) {
            if lane.asleep.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }

        shared.run_tasks(0, lanes, direction, body);

        // All tasks are taken. Close the run, and wait for the workers that still execute a task.
        let state = shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        let empty = || (shared.state.load(Ordering::SeqCst) & INSIDE_MASK == 0).then_some(());
        if state & INSIDE_MASK != 0 && poll_with_timeout(empty).is_none() {
            while empty().is_none() {
                thread::park();
            }
        }
        if shared.panicked.swap(false, Ordering::SeqCst) {
            // SAFETY: all workers left, so this thread has exclusive access to the cell.
            if let Some(panic) = unsafe { (*shared.panic.get()).take() } {
                resume_unwind(panic);
            }
        }
    }
}

impl Shared {
    /// Executes tasks until none is left: first the tasks of its own lane, then the tasks of other lanes.
    fn run_tasks(&self, worker: usize, lanes: usize, direction: Direction, body: &Body<'_>) {
        let _inside = TaskGuard::enter();
        let before = DROPPED.replace(&raw const self.panicked);
        let result = catch_unwind(AssertUnwindSafe(|| {
            for step in 0..lanes {
                let lane = &self.lanes[(worker + step) % lanes];
                let [first, end] = [&lane.first, &lane.end].map(|bound| bound.load(Ordering::Relaxed));
                loop {
                    let index = lane.next.fetch_add(1, Ordering::Relaxed);
                    if index >= end || self.panicked.load(Ordering::Relaxed) {
                        break;
                    }
                    body(direction.task_at(index, first, end), worker);
                    pause();
                }
            }
        }));
        DROPPED.set(before);
        if let Err(panic) = result
            && !self.panicked.swap(true, Ordering::SeqCst)
        {
            // SAFETY: only the thread that set the flag writes, and the caller reads after all threads have left.
            unsafe { *self.panic.get() = Some(panic) };
        }
    }

    /// Main loop of worker `lane`.
    fn worker_loop(&self, lane: usize) {
        let mut last_run = 0;
        loop {
            let Some(run) = self.wait_for_run(lane, last_run) else { return };
            last_run = run;
            if self.try_enter_run(run) {
                // SAFETY: during an open run `job` is not written, and its pointer is valid.
                let (body, direction, lanes, caller) = unsafe {
                    let job = &*self.job.get();
                    (&*job.body, job.direction, job.lanes, job.caller.clone())
                };
                if lane < lanes {
                    self.run_tasks(lane, lanes, direction, body);
                }
                let before = self.state.fetch_sub(1, Ordering::SeqCst);
                if before & OPEN == 0 && before & INSIDE_MASK == 1 {
                    caller.unpark();
                }
            }
        }
    }

    /// Waits for a run other than `last_run`; returns `None` when the team is disbanded.
    fn wait_for_run(&self, lane: usize, last_run: u64) -> Option<u64> {
        let other = || {
            let state = self.state.load(Ordering::SeqCst);
            let run = state & !(RUN_INCREMENT - 1);
            if state & STOP != 0 { Some(None) } else { (run != last_run).then_some(Some(run)) }
        };
        if let Some(wake) = poll_with_timeout(other) {
            return wake;
        }
        let asleep = &self.lanes[lane].asleep;
        loop {
            // Order matters: the caller opens the run, then checks for sleeping workers; a worker does these steps in
            // reverse.
            asleep.store(true, Ordering::SeqCst);
            if let Some(wake) = other() {
                asleep.store(false, Ordering::SeqCst);
                return wake;
            }
            thread::park();
        }
    }

    /// Enters run `run`, and returns true, if the run is still open.
    fn try_enter_run(&self, run: u64) -> bool {
        let mut state = self.state.load(Ordering::SeqCst);
        while state & OPEN != 0 && state & !(RUN_INCREMENT - 1) == run {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::stoppable;

    use super::*;

    fn assert_each_task_runs_once(pool: &Pool, tasks: usize) {
        let done: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(tasks, usize::MAX, &|task, worker| {
            assert!(worker < pool.num_threads().max(8));
            done[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_task_runs_once() {
        for threads in 1..=5 {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                assert_each_task_runs_once(&pool, tasks);
            }
        }
    }

    #[test]
    fn every_task_runs_once_backwards() {
        for threads in 1..=5 {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let done: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run_backwards(tasks, usize::MAX, &|task, _| {
                    done[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
        let visited = std::sync::Mutex::new(Vec::new());
        Pool::new(1).run_backwards(4, usize::MAX, &|task, _| visited.lock().unwrap().push(task));
        assert_eq!(visited.into_inner().unwrap(), [3, 2, 1, 0]);
    }

    #[test]
    fn map_results_are_in_order() {
        for threads in [1, 3] {
            let squares = Pool::new(threads).map(100, |task| task * task);
            assert_eq!(squares, (0..100).map(|task| task * task).collect::<Vec<usize>>());
        }
    }

    #[test]
    fn many_short_runs() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(4, usize::MAX, &|task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 20_000 * 6);
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            assert_each_task_runs_once(&pool, 10);
            thread::sleep(std::time::Duration::from_millis(3));
        }
    }

    #[test]
    fn workers_run_one_task_at_a_time() {
        let pool = Pool::new(4);
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..200 {
            pool.run(50, 3, &|_, worker| {
                assert!(worker < 3, "the limit holds");
                assert!(!busy[worker].swap(true, Ordering::SeqCst));
                thread::yield_now();
                busy[worker].store(false, Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn nested_runs_execute_on_the_caller() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        pool.run(6, usize::MAX, &|_, _| {
            pool.run(5, usize::MAX, &|task, worker| {
                assert_eq!(worker, 0);
                sum.fetch_add(task, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 60);
    }

    #[test]
    fn panic_reaches_the_caller_and_the_pool_still_works() {
        let pool = Pool::new(3);
        for bad in 0..8 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, usize::MAX, &|task, _| assert!(task != bad, "task {task}"));
            }));
            let panic = result.expect_err("a task panicked");
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("task {bad}")));
            assert_each_task_runs_once(&pool, 8);
        }
    }

    #[test]
    fn runs_stop_between_and_inside_tasks() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for long in [false, true] {
                let (mut polls, done) = (0, AtomicUsize::new(0));
                let ask = move || {
                    polls += 1;
                    polls > 3
                };
                // Tasks without end.
                let task = |_: usize, _: usize| {
                    done.fetch_add(1, Ordering::Relaxed);
                    if long {
                        loop {
                            pause();
                        }
                    }
                };
                let stopped = stoppable(Box::new(ask), || pool.run(1 << 40, usize::MAX, &task));
                assert_eq!(stopped, Err(Stopped));
                assert!(done.into_inner() > 0);
                assert_each_task_runs_once(&pool, 20);
            }
            assert_eq!(stoppable(Box::new(|| false), || assert_each_task_runs_once(&pool, 9)), Ok(()));
        }
    }

    #[test]
    fn stop_question_may_use_the_pool() {
        let pool = Arc::new(Pool::new(2));
        let other = Arc::clone(&pool);
        let ask = move || {
            assert_each_task_runs_once(&other, 5);
            false
        };
        assert_eq!(stoppable(Box::new(ask), || assert_each_task_runs_once(&pool, 20)), Ok(()));
    }

    #[test]
    fn threads_share_a_pool() {
        let pool = Pool::new(2);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..500).for_each(|_| assert_each_task_runs_once(&pool, 9)));
            }
        });
    }

    #[test]
    fn the_number_of_threads_can_change() {
        let pool = Pool::new(1);
        for threads in [3, 1, 2, 5, 2] {
            pool.set_num_threads(threads);
            assert_eq!(pool.num_threads(), threads);
            assert_each_task_runs_once(&pool, 33);
        }
    }
}
