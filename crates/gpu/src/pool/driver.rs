//! Pools of the CUDA driver.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{addr_of_mut, from_mut};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{device, mem_pool};
use cudarc::driver::sys::{
    CUmemAllocationType_enum, CUmemLocationType_enum, CUmemPool_attribute,
    CUmemPool_attribute_enum, CUmemPoolProps, CUmemoryPool,
};
use cudarc::driver::{CudaContext, DriverError};

use super::Usage;
use crate::{Error, driver_error};

/// Lets a GPU's current pool keep freed memory for later allocations of this process. By default, the driver takes
/// freed memory back each time the process waits for the GPU.
///
/// # Errors
/// [`Error::Driver`].
pub fn retain(gpu: usize) -> Result<(), Error> {
    let context = keep_open(gpu)?;
    let keep = || set_threshold(current_pool(&context)?);
    keep().map_err(driver_error("keep free memory"))
}

/// Makes a new pool the GPU's current pool until this process ends. It has at most `bytes` bytes; the driver rounds
/// this limit up. If `reserve` is true, the pool takes all of this memory at once, otherwise only when it is needed.
/// The pool keeps freed memory. The memory of the driver itself and of libraries is outside of the pool.
///
/// # Errors
/// [`Error::Driver`], for example if less memory is free than the pool reserves.
pub fn limit(gpu: usize, bytes: u64, reserve: bool) -> Result<(), Error> {
    let context = keep_open(gpu)?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let pool = create(&context, bytes).map_err(driver_error("make a pool of memory"))?;
    set_threshold(pool).map_err(driver_error("keep free memory"))?;
    // SAFETY: the device is that of an open context, and the pool is never destroyed.
    unsafe { device::set_mem_pool(context.cu_device(), pool) }
        .map_err(driver_error("use a pool of memory"))?;
    if reserve {
        let reserved = context.default_stream().alloc_zeros::<u8>(bytes);
        let reserved = reserved.and_then(|memory| {
            drop(memory);
            context.synchronize()
        });
        reserved.map_err(driver_error("reserve memory"))?;
    }
    Ok(())
}

/// Returns the memory of the GPU's current pool.
///
/// # Errors
/// [`Error::Driver`].
pub fn usage(gpu: usize) -> Result<Usage, Error> {
    let context = open(gpu)?;
    let read = || {
        let pool = current_pool(&context)?;
        Ok(Usage {
            used: attribute(
                pool,
                CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            )?,
            most_used: attribute(
                pool,
                CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            )?,
            held: attribute(
                pool,
                CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            )?,
        })
    };
    read().map_err(driver_error("report the memory in use"))
}

/// The GPUs with changed pools. They stay open, because closing a GPU may discard its pool's settings.
static OPEN: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());

fn open(gpu: usize) -> Result<Arc<CudaContext>, Error> {
    CudaContext::new(gpu).map_err(driver_error("open the GPU"))
}

/// Opens a GPU until the process ends.
fn keep_open(gpu: usize) -> Result<Arc<CudaContext>, Error> {
    let context = open(gpu)?;
    let mut kept = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push(Arc::clone(&context));
    Ok(context)
}

fn current_pool(context: &CudaContext) -> Result<CUmemoryPool, DriverError> {
    // SAFETY: the device is that of an open context.
    unsafe { device::get_mem_pool(context.cu_device()) }
}

fn create(context: &CudaContext, bytes: usize) -> Result<CUmemoryPool, DriverError> {
    // SAFETY: the type is plain C data, for which zeros are valid: no handle type, no security attributes, and reserved bytes
    // that must be zero.
    let mut properties: CUmemPoolProps = unsafe { MaybeUninit::zeroed().assume_init() };
    properties.allocType = CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.maxSize = bytes;
    let number = c_int::try_from(context.ordinal()).unwrap_or(c_int::MAX);
    // SAFETY: the location is a type and the device's number, each an int; newer versions of the driver have the number in a union.
    unsafe {
        addr_of_mut!(properties.location)
            .cast::<c_int>()
            .add(1)
            .write(number);
    }
    // SAFETY: the properties are valid, as set above.
    unsafe { mem_pool::create(&properties) }
}

/// Lets a pool keep all of its freed memory.
fn set_threshold(pool: CUmemoryPool) -> Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the pool is valid, and this attribute is a number of 64 bits.
    unsafe {
        mem_pool::set_attribute(
            pool,
            CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            from_mut(&mut threshold).cast::<c_void>(),
        )
    }
}

fn attribute(pool: CUmemoryPool, which: CUmemPool_attribute) -> Result<u64, DriverError> {
    let mut value = 0u64;
    // SAFETY: the pool is valid, and each attribute that is asked for here is a number of 64 bits.
    unsafe { mem_pool::get_attribute(pool, which, from_mut(&mut value).cast::<c_void>()) }?;
    Ok(value)
}
