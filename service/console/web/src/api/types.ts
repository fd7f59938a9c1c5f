// The names by which screens call the shapes of the API. All come from its committed description.
import type { components } from './schema.gen'
import type { LedgerMore } from './interim'

type S = components['schemas']
export type JobSummary = S['JobSummary']
export type JobOut = S['JobOut']
export type HandoffOut = S['HandoffOut']
export type NodeOut = S['NodeOut']
export type DecisionOut = S['DecisionOut']
export type PlanOut = S['PlanOut']
export type AlternativeOut = S['AlternativeOut']
export type CheckpointOut = S['CheckpointOut']
export type GenerationOut = S['GenerationOut']
export type ChannelOut = S['ChannelOut']
export type LogOut = S['LogOut']
export type MetricsOut = S['MetricsOut']
export type StepOut = S['StepOut']
export type AuditOut = S['AuditOut']
export type TokenOut = S['TokenOut']
export type RestartsOut = S['RestartsOut']
export type Cause = S['Cause']
export type LedgerOut = S['LedgerOut'] & LedgerMore
export type * from './interim'
