import type { JobOut } from '../../api/types'
export default function WhatIf(_: { job: JobOut }) { return null }
