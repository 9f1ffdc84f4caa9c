//! Memory of the machine: how much there is, and large pages.
//!
//! Memory that the system gives page by page costs a page fault for every 4 KiB, which takes longer than to fill them,
//! and later more entries of the address cache than there are. Systems have larger pages for who asks.

/// The size of large pages, of which memory has whole ones where it pays to ask.
#[cfg(target_os = "linux")]
const LARGE: usize = 2 << 20;

/// Asks the system for large pages where memory was not touched yet. Contents stay as they are, and nothing happens where
/// the system has none. Of the region only whole large pages count, so it takes no more memory with them.
pub fn prefer_large_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let skip = start.align_offset(LARGE);
        let Some(whole) = bytes.checked_sub(skip).map(|rest| rest / LARGE * LARGE) else { return };
        if whole > 0 {
            // SAFETY: advice changes no contents and no protection, wherever the region lies; the system refuses one
            // that is not this process's, and then there is nothing to do.
            let _ = unsafe { libc::madvise(start.wrapping_add(skip).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Bytes of memory that the machine has; `None` where the system does not tell.
#[must_use]
pub fn memory_bytes() -> Option<u64> {
    #[cfg(unix)]
    {
        // SAFETY: both calls read numbers of the system.
        let (pages, size) =
            unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        u64::try_from(pages).ok()?.checked_mul(u64::try_from(size).ok()?)
    }
    #[cfg(not(unix))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn there_is_memory() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn contents_stay_and_any_region_may_be_asked_for() {
        let mut bytes: Vec<u8> = (0..8 << 20).map(|i| (i % 251) as u8).collect();
        let start = bytes.as_mut_ptr();
        for (skip, len) in [(0, 8 << 20), (1, 5 << 20), (4097, 2 << 20), (3, 7), (0, 0)] {
            prefer_large_pages(start.wrapping_add(skip), len);
        }
        prefer_large_pages(std::ptr::null_mut(), 8 << 20);
        assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == (i % 251) as u8));
    }
}
