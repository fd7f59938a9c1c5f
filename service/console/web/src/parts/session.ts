// Who looks at the console, and what that person may do. The service decides; this only spares people a refusal.
import { useQuery } from '@tanstack/react-query'
import { ask } from '../api/queries'
import type { SessionOut } from '../api/types'

export type Role = SessionOut['role']
// Tokens of nodes open no session.
const ORDER: readonly Role[] = ['viewer', 'operator', 'admin']

export const allows = (role: Role | undefined, needed: Role): boolean => role !== undefined && ORDER.indexOf(role) >= ORDER.indexOf(needed)

export function useRole(): Role | undefined {
  return useQuery(ask.session()).data?.role
}
